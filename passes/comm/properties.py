"""Properties of symbols: how a line of a trace uses memory and the values that it reads."""

from __future__ import annotations

from enum import Flag, auto


class Property(Flag):
    """The properties of a symbol, any number of them. :mod:`passes.analysis.symbols` lists those of Thunder's symbols;
    our own symbols carry theirs as tags."""

    NONE = 0
    FREE = auto()  # computes nothing: a comment, a line for Python's names, or one that takes time only on a link
    VIEW = auto()  # the results share the memory of the first argument (a reshape copies if its strides demand it)
    INDEX = auto()  # a view if indexed by numbers and slices, a look-up if indexed by a tensor
    CAST = auto()  # the arguments in another dtype or on another device; moves nothing if they have these already
    COPY = auto()  # the first argument in new memory, or in the same memory if it has the wanted layout already
    LOOK_UP = auto()  # reads no more of its table, the first argument, than it writes
    PARTS = auto()  # copies parts of the arguments: reads as much of them as it writes
    CONSTANT = auto()  # makes a tensor from numbers, the same one each time
    RANDOM = auto()  # may draw random numbers
    IN_PLACE = auto()  # changes an argument
    STATEFUL = auto()  # reads and changes tensors that outlive the step and are not among its arguments

    @property
    def is_alias(self) -> bool:
        """True if the results hold the values of the first argument, perhaps in the same memory."""
        return bool(self & (Property.VIEW | Property.INDEX | Property.CAST | Property.COPY))
