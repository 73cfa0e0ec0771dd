"""Errors that compiled rollouts report as numbers: the one table of kinds for the CPU and the GPU.

A code is `step * KINDS + kind` of one row (the CPU appends the row), so that the smallest code is the first error.
`first_error` in cpu/rollout.py and `outcome_row` in device_rows.py write them.
"""

POLICY, ACTION, REWARD, FINAL_OBSERVATION, OBSERVATION, KINDS = range(6)
"""What failed in a step: an action's log-probability, an illegal action, or a non-finite number from the env."""
NO_ERROR = 2**63 - 1
NO_ERROR_INT32 = 2**31 - 1
"""`NO_ERROR` where codes are int32."""
NAMES = {REWARD: "reward", FINAL_OBSERVATION: "final observation", OBSERVATION: "observation"}
"""Names of the numbers that an env returns."""


def policy_message(where: str) -> str:
    """The message for POLICY; `where` names env and step."""
    return (
        f"The policy's log-probability in {where} is not finite: its weights are not, or are huge. Continue from a checkpoint, "
        "with a lower learning_rate."
    )
