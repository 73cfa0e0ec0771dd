"""From a trained run to a policy in use; knows nothing of training loops."""
