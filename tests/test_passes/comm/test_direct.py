"""Messages between ranks: real ones, as only they show that what one rank sends is what another expects."""

import pytest
import workers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_two_ranks(two_ranks, dtype):
    two_ranks.run(workers.exchange_bucket, dtype=dtype)


def test_three_ranks(three_ranks):
    three_ranks.run(workers.exchange_bucket, dtype="float32")
