"""One module for each kind of tokenizer; `bertjax.text.tokenizer` loads them."""
