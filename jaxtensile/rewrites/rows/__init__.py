"""Work on some rows after the others: which rows there are, and the loop over parts of them."""
