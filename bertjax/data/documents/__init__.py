"""Where text and labelled data lie, how they are read, and which documents are used."""
