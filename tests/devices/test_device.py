"""Every target has believable numbers with a source; a wrong name is told the right ones."""

import dataclasses
import os

import pytest

import jaxtensile
from jaxtensile.devices.gpu_description import FACTS, target_config
from jaxtensile.devices.profiles import NUMBERS, DeviceProfile, profile, profile_for_kind, targets
from jaxtensile.units import GIB, KIB, MIB

RATES = ("memory_bandwidth", "matmul_flops_bf16", "matmul_flops_f32", "elementwise_flops", "link_bandwidth")
NAMES = (  # the public surface promises exactly these
    "nvidia-h200 nvidia-h100-80gb nvidia-a100-80gb nvidia-a100-40gb nvidia-b200 nvidia-rtx-a6000 nvidia-v100-16gb "
    "nvidia-l4 nvidia-rtx-4090 nvidia-rtx-3060 tpu-v5e tpu-v5p tpu-v6e cpu"
).split()
BOARD_GB = {  # what the vendor prints on the box
    "nvidia-h200": 141, "nvidia-h100-80gb": 80, "nvidia-a100-80gb": 80, "nvidia-a100-40gb": 40, "nvidia-b200": 192,
    "nvidia-rtx-a6000": 48, "nvidia-v100-16gb": 16, "nvidia-l4": 24, "nvidia-rtx-4090": 24, "nvidia-rtx-3060": 12,
    "tpu-v5e": 16, "tpu-v5p": 96, "tpu-v6e": 32,
}  # fmt: skip


def test_the_names():
    assert sorted(targets()) == sorted(NAMES)
    assert jaxtensile.targets() == targets()


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_whole(name):
    device = profile(name)
    assert device.name == name
    assert device.platform == name.split("-")[0].replace("nvidia", "cuda")
    assert set(device.sources) == set(NUMBERS) <= {f.name for f in dataclasses.fields(device)}
    assert all(len(source) > 10 for source in device.sources.values())
    assert not device.measured
    for rate in RATES:
        assert getattr(device, rate) > 1e9, rate
    assert 0 < device.kernel_launch < 1e-3
    assert 0 < device.link_latency < 1e-3
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.capacity = 0


@pytest.mark.parametrize(("name", "gigabytes"), BOARD_GB.items())
def test_capacity_is_the_board_less_a_little(name, gigabytes):
    assert 0.91 * gigabytes * GIB < profile(name).capacity <= gigabytes * GIB


@pytest.mark.parametrize("name", BOARD_GB)
def test_rates_are_ordered_as_hardware_is(name):
    device = profile(name)
    assert device.matmul_flops_bf16 >= device.matmul_flops_f32 >= device.elementwise_flops * 0.99
    assert device.link_bandwidth < device.memory_bandwidth / 5
    # Between 10 and 400 operations per byte: outside of that a unit was mistaken.
    assert 10 < device.matmul_flops_bf16 / device.memory_bandwidth < 600


def test_newer_and_larger_devices_are_faster():
    for slow, fast in [("nvidia-a100-40gb", "nvidia-h200"), ("nvidia-l4", "nvidia-h200"), ("tpu-v5e", "tpu-v6e")]:
        for rate in RATES:
            assert getattr(profile(slow), rate) <= getattr(profile(fast), rate), (slow, rate)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("h200", "nvidia-h200"),
        ("a100", "nvidia-a100-80gb"),
        ("nvidia_l4", "nvidia-l4"),
        ("TPU-V5E", "tpu-v5e"),
        ("nvidia-h20", "nvidia-h200"),
    ],
)
def test_an_unknown_target_is_told_the_nearest(wrong, right):
    with pytest.raises(jaxtensile.TargetError) as caught:
        profile(wrong)
    nearest, known, _ = str(caught.value).split(". ")
    assert repr(wrong) in nearest
    assert f"'{right}'" in nearest
    assert all(name in known for name in targets())


@pytest.mark.parametrize("nonsense", ["", " ", "a very long name that resembles nothing at all"])
def test_nonsense_is_an_error_too(nonsense):
    with pytest.raises(jaxtensile.TargetError, match="unknown target"):
        profile(nonsense)


@pytest.mark.parametrize("name", BOARD_GB)
def test_kinds_lead_back_to_their_profile(name):
    platform = "tpu" if name.startswith("tpu") else "gpu"
    assert {profile_for_kind(kind, platform) for kind in profile(name).kinds} == {profile(name)}


@pytest.mark.parametrize(("kind", "platform"), [("NVIDIA T4", "gpu"), ("TPU v9", "tpu"), ("Radeon", "rocm")])
def test_an_unknown_kind_is_never_better_than_a_known_one(kind, platform):
    guess = profile_for_kind(kind, platform)
    assert guess.name.endswith("-unknown")
    assert all(kind in source for source in guess.sources.values())
    for known in (profile(n) for n in BOARD_GB if profile(n).platform == guess.platform):
        assert guess.capacity <= known.capacity
        for rate in RATES:
            assert getattr(guess, rate) <= getattr(known, rate)


def test_the_cpu_is_this_machine():
    device = profile("cpu")
    assert MIB < device.capacity <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert profile_for_kind("cpu", "cpu") == device


def test_profiles_are_slotted():
    assert not hasattr(profile("cpu"), "__dict__")
    assert DeviceProfile.__dataclass_params__.frozen


def test_every_cuda_target_is_described():
    assert set(FACTS) == {n for n in targets() if profile(n).platform == "cuda"}


@pytest.mark.parametrize("name", FACTS)
def test_a_description_says_what_the_profile_says(name):
    text = target_config(name)
    assert f"device_memory_size: {profile(name).capacity}\n" in text
    assert f"memory_bandwidth: {int(profile(name).memory_bandwidth)}\n" in text
    assert f'device_description_str: "{profile(name).kinds[0]}"' in text
    assert text.count("{") == text.count("}") == 4


def test_descriptions_have_the_numbers_of_the_cards():
    """The table of XLA's own device descriptions, by way of one card of each generation."""
    hopper, volta = target_config("nvidia-h200"), target_config("nvidia-v100-16gb")
    for line in ("core_count: 132", "shared_memory_per_core: 233472", "shared_memory_per_block_optin: 232448"):
        assert line in hopper
    for line in (
        "shared_memory_per_block_optin: 98304",
        "cuda_compute_capability { major: 7 minor: 0 }",
        "{ major: 12 ",
    ):
        assert line in volta
    assert FACTS["nvidia-a100-80gb"].shared - KIB == 166912
    assert FACTS["nvidia-rtx-a6000"].shared - KIB == 101376
