"""Documents of a corpus: where they lie, how they are read, cleaned and selected; tables of labelled data."""
