"""The table that tells compiled code all about one MLP policy: where its arrays lie, and what observations and actions are."""

from __future__ import annotations

import numpy as np

# The table of a policy, int64; what ends in _AT is an address.
(
    ROW_AT,  # the compiled functions: see `address_for_one` and `addresses_for_many`
    ROWS_AT,
    FORWARD_AT,
    WEIGHTS_AT,  # float32, packed as in network.py
    LAYERS_AT,  # int64 [NUM_LAYERS, COLUMNS], as in network.py
    NUM_LAYERS,
    NUM_WEIGHTS,
    WIDEST,  # the largest STRIDE of a layer
    WORK_SIZE,  # floats that `network.forward` needs for a tile
    INPUT_KIND,
    NUM_NUMBERS,  # of an observation
    NUM_INPUTS,  # that the first layer takes
    LISTED,  # the most non-zeros of an observation that are listed; 0: none
    OBS_DTYPE,  # place in DTYPES
    LOW_AT,  # float32 [NUM_NUMBERS], as is the next: where bytes begin, and how far they go
    SPAN_AT,
    MEAN_AT,  # float64 [NUM_NUMBERS], as is the next; the clip is STD's last
    STD_AT,
    FIRST_AT,  # of one-hot entries, int64 [NUM_NUMBERS], as are the next two: their least value,
    LAST_AT,  # their number of values less one,
    OFFSET_AT,  # and where they begin among the inputs
    HEAD_KIND,
    NUM_OUTPUTS,
    ACTION_SIZE,  # numbers of an action
    ACTION_DTYPE,  # place in DTYPES
    NVEC_AT,  # int64 [ACTION_SIZE], as is the next: options of each choice, and its first one
    START_AT,
    BOUNDS_AT,  # float64 [4, ACTION_SIZE]: what a squashed action begins at and how far it goes, least, greatest
    ARRAY_TYPE,  # what `data_of` compares an object with: the address of numpy.ndarray,
    TYPE_NUMBER,  # NumPy's number of the dtype,
    NUM_DIMENSIONS,
    SHAPE,  # and the shape, from here to the end of the table
) = range(32)

NUMBERS, SCALED, NORMALIZED, ONE_HOT, INTEGER = range(5)
"""Kinds of input: INTEGER is ONE_HOT of a single number, which `row` takes in place of an address."""
CATEGORICAL, MULTI_CATEGORICAL, GAUSSIAN, SQUASHED_GAUSSIAN, BETA = range(5)
"""Kinds of actions."""
DTYPES = tuple(map(np.dtype, ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")))
BOOL, I1, U1, I2, U2, I4, U4, I8, U8, F4, F8 = range(len(DTYPES))
REFUSED = -(2**63)
"""In place of an action: the observation is not one of the policy's, or holds NaN."""
