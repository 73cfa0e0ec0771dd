"""The table that describes one MLP policy to compiled code: its arrays, observations and actions."""

from __future__ import annotations

import numpy as np

# Indices into the table, which is int64; names ending in _AT are addresses.
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
    NUM_NUMBERS,  # elements of an observation
    NUM_INPUTS,  # inputs of the first layer
    LISTED,  # maximum nonzeros listed per observation; 0: none
    OBS_DTYPE,  # index in DTYPES
    LOW_AT,  # float32 [NUM_NUMBERS], like the next: lower bound and range of bytes
    SPAN_AT,
    MEAN_AT,  # float64 [NUM_NUMBERS], like the next; STD ends with the clip
    STD_AT,
    FIRST_AT,  # for one-hot entries, int64 [NUM_NUMBERS], like the next two: lowest value,
    LAST_AT,  # number of values minus one,
    OFFSET_AT,  # and offset among the inputs
    PARTS_AT,  # for nested observations, int64 [NUM_PARTS, 4]: the table of each part, its first byte, its first input, and
    NUM_PARTS,  # whether its numbers are compressed
    HEAD_KIND,
    NUM_OUTPUTS,
    ACTION_SIZE,  # elements of an action
    ACTION_DTYPE,  # index in DTYPES
    NVEC_AT,  # int64 [ACTION_SIZE], like the next: options of each choice, and the first one
    START_AT,
    BOUNDS_AT,  # float64 [4, ACTION_SIZE]: offset and range of a squashed action, lower and upper bound
    ARRAY_TYPE,  # what `data_of` compares an object with: the address of numpy.ndarray,
    TYPE_NUMBER,  # NumPy's type number of the dtype,
    NUM_DIMENSIONS,
    SHAPE,  # and the shape, from here to the end of the table
) = range(34)

NUMBERS, SCALED, NORMALIZED, ONE_HOT, INTEGER, NESTED = range(6)
"""Kinds of input. INTEGER is ONE_HOT of a single number, which `row` takes instead of an address."""
CATEGORICAL, MULTI_CATEGORICAL, GAUSSIAN, BETA, SQUASHED_GAUSSIAN = range(5)
"""Kinds of heads, numbered as in `HEAD_KINDS` of policies/action_transform.py."""
EPSILON_GREEDY = 5
"""One choice from the values of all, sampled ε-greedily; where env actions and modes are concerned, it is CATEGORICAL."""
SCALED_ACTIONS, SQUASHED_ACTIONS = 1, 2
"""What is done to a Box's raw actions before they are clipped; 0: nothing. `SCALINGS` of policies/action_transform.py."""
DTYPES = tuple(map(np.dtype, ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")))
BOOL, I1, U1, I2, U2, I4, U4, I8, U8, F4, F8 = range(len(DTYPES))
REFUSED = -(2**63)
"""Returned instead of an action: the observation does not fit the policy's space, or contains NaN."""
