import pytest

from support.devices import visible_to


@pytest.mark.parametrize(
    ("worker", "devices", "want"),
    [
        ("gw0", "0,1,2,3", "0,1,2,3"),
        ("gw1", "0,1,2,3", "1,2,3,0"),
        ("gw14", "4,6,7", "7,4,6"),
        ("gw3", "GPU-8932f937", "GPU-8932f937"),
    ],
)
def test_workers_share_gpus(worker, devices, want):
    assert visible_to(worker, devices) == want
