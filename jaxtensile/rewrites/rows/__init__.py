"""Row-by-row work: which rows there are, and the loop over parts of them."""
