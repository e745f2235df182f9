"""Documents of a corpus: finds, reads, cleans and selects them; reads tables of labelled data."""
