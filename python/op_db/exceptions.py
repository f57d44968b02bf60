"""Operators of the database that are not tried, or may be refused, each with the reason. Names as in the table."""

#: Not tried.
LEFT_OUT: dict[str, str] = {
    "sparse.mm.reduce": "a distributed tensor is strided, and a matrix of this operator is in the sparse CSR format",
    "sparse.sampled_addmm": "a distributed tensor is strided, and a matrix of this operator is in the sparse CSR format",
    "to_sparse": "a distributed tensor is strided, and the result of this operator is sparse",
}

#: Tried in this way ("function", "in-place" or "out"); being refused is then no failure.
MAY_REFUSE: dict[tuple[str, str], str] = {
    (
        "addbmm",
        "in-place",
    ): "one device gives self another shape if it has to be broadcast, which is no sum in place",
    ("lu", "out"): "torch.lu resizes what it is given, even to the shape that it has",
    (
        "resize_",
        "function",
    ): "it changes the size of the memory of a tensor, and that of a distributed one lies on many ranks",
    (
        "resize_",
        "in-place",
    ): "it changes the size of the memory of a tensor, and that of a distributed one lies on many ranks",
    (
        "resize_as_",
        "function",
    ): "it changes the size of the memory of a tensor, and that of a distributed one lies on many ranks",
    (
        "resize_as_",
        "in-place",
    ): "it changes the size of the memory of a tensor, and that of a distributed one lies on many ranks",
}
