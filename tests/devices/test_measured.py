"""Measured rates outlive a process, are used by every later plan of their kind, and never stop anybody."""

import json
import os
import stat
import warnings

import pytest

from jaxtensile.devices import measured
from jaxtensile.devices.cachefiles import cache_folder
from jaxtensile.devices.measured import Measurement, applied, best_known, file_of, keep, load
from jaxtensile.devices.profiles import OF_MEASURED, profile, profile_for_kind
from jaxtensile.passes.seconds.cost import COPY_SHARE
from jaxtensile.search.request import LINK_SHARE

H200 = "NVIDIA H200"


def found(kind=H200, **numbers):
    numbers = numbers or {"memory_bandwidth": 4.3e12, "matmul_flops_bf16": 7.9e14}
    return Measurement(
        kind=measured.full_kind(kind),
        jaxlib=measured.jaxlib_version(),
        date="2026-01-31",
        took=2.5,
        numbers=numbers,
        how={name: f"{name} somehow" for name in numbers},
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "_unwritten", {})
    return tmp_path


def test_what_is_kept_is_found_again(cache):
    assert load(H200) is None
    path = keep(found(), H200)
    assert path == file_of(H200)
    assert path.is_relative_to(cache / "jaxtensile" / "profiles")
    assert load(H200) == found()
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_measured_numbers_replace_published_ones_and_say_so():
    published = profile("nvidia-h200")
    device = applied(published, found(), H200)
    assert (device.memory_bandwidth, device.matmul_flops_bf16) == (4.3e12, 7.9e14)
    assert device.measured == {"memory_bandwidth", "matmul_flops_bf16"}
    assert "2026-01-31" in device.sources["memory_bandwidth"]
    assert device.matmul_flops_f32 == published.matmul_flops_f32
    assert device.sources["link_bandwidth"] == published.sources["link_bandwidth"]


def test_programs_get_nearly_all_of_a_measured_rate_and_a_share_of_a_peak():
    published = profile("nvidia-h200")
    device = applied(published, found(), H200)
    assert published.reached("memory_bandwidth", COPY_SHARE) == pytest.approx(4.8e12 * COPY_SHARE)
    assert device.reached("memory_bandwidth", COPY_SHARE) == pytest.approx(4.3e12 * OF_MEASURED)
    assert device.reached("link_bandwidth", LINK_SHARE) == published.reached("link_bandwidth", LINK_SHARE)
    # The measured H200 is what the shares of the peaks were made from.
    assert device.reached("memory_bandwidth", COPY_SHARE) == pytest.approx(4.8e12 * COPY_SHARE, rel=0.01)


def test_a_kind_finds_its_own_and_a_target_the_first_of_its_kinds():
    sxm, pcie = profile("nvidia-a100-80gb").kinds
    keep(found(pcie, memory_bandwidth=1.7e12), pcie)
    assert not best_known(profile_for_kind(sxm, "gpu"), sxm).measured
    assert best_known(profile_for_kind(pcie, "gpu"), pcie).memory_bandwidth == 1.7e12
    target = best_known(profile("nvidia-a100-80gb"))
    assert (target.memory_bandwidth, target.kinds[0]) == (1.7e12, pcie)
    keep(found(sxm, memory_bandwidth=1.8e12), sxm)
    assert best_known(profile("nvidia-a100-80gb")).memory_bandwidth == 1.8e12
    assert profile("nvidia-a100-80gb").memory_bandwidth == 2.039e12


def test_an_unknown_kind_gets_its_own_numbers():
    kind = "NVIDIA Something"
    keep(found(kind, capacity=8e9, memory_bandwidth=5e11), kind)
    device = best_known(profile_for_kind(kind, "gpu"), kind)
    assert device.capacity == 8_000_000_000 and isinstance(device.capacity, int)
    assert device.memory_bandwidth == 5e11


def test_a_cpu_is_one_processor_with_so_many_cores(monkeypatch):
    keep(found("cpu"), "cpu")
    assert load("cpu") is not None
    monkeypatch.setattr(measured, "full_kind", lambda kind: f"{kind}: another machine with the same home folder")
    assert load("cpu") is None


def test_another_jaxlib_measures_anew(monkeypatch):
    keep(found(), H200)
    monkeypatch.setattr(measured, "jaxlib_version", lambda: "99.0")
    assert load(H200) is None


WHOLE = {"format": 1, "kind": H200, "jaxlib": measured.jaxlib_version(), "date": "2026-01-31", "took": 1.0}
BANDWIDTH = {"numbers": {"memory_bandwidth": 1e12}, "how": {"memory_bandwidth": "somehow"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ('{"format": 1, "kind"', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1, 2]", "no table"),
        (json.dumps({**WHOLE, **BANDWIDTH, "format": 2}), "format"),
        (json.dumps({**WHOLE, **BANDWIDTH, "kind": "NVIDIA H100"}), "kind"),
        (json.dumps({**WHOLE, **BANDWIDTH, "jaxlib": "0.1"}), "jaxlib"),
        (json.dumps({**WHOLE, **BANDWIDTH, "date": 7}), "when"),
        (json.dumps({**WHOLE, "numbers": {}, "how": {}}), "go together"),
        (json.dumps({**WHOLE, **BANDWIDTH, "how": {}}), "go together"),
        (json.dumps({**WHOLE, "numbers": {"name": 1.0}, "how": {"name": "x"}}), "no number of a profile"),
        *[
            (json.dumps({**WHOLE, **BANDWIDTH, "numbers": {"memory_bandwidth": x}}), "memory_bandwidth is")
            for x in (0, -1.0, "fast", None, True, float("nan"), float("inf"))
        ],
    ],
)
def test_what_is_not_whole_or_foreign_is_passed_over(text, said):
    path = file_of(H200)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=said) as told:
        assert load(H200) is None
    assert str(path) in str(told[0].message) and "--refresh" in str(told[0].message)
    keep(found(), H200)
    assert load(H200) == found()


def test_bytes_that_are_no_text_are_passed_over():
    path = file_of(H200)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert load(H200) is None


def test_a_folder_in_the_place_of_the_file_is_passed_over():
    file_of(H200).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert load(H200) is None


def test_what_cannot_be_written_holds_for_the_process(cache):
    (cache / "jaxtensile").write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="this process only"):
        assert keep(found(), H200) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(H200) == found()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_can_be_read(cache):
    path = keep(found(), H200)
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert load(H200) == found()
        with pytest.warns(RuntimeWarning, match="this process only"):
            assert keep(found(), H200) is None
    finally:
        path.parent.chmod(stat.S_IRWXU)


@pytest.mark.parametrize(("given", "home", "folder"), [("rel/ative", "/home/u", "/home/u/.cache/jaxtensile")])
def test_the_folder_by_the_rules(monkeypatch, given, home, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", home)
    assert str(cache_folder()) == folder
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/u")
    assert str(cache_folder()) == "/var/cache/u/jaxtensile"


def test_a_process_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder() is None
    assert load(H200) is None
    with pytest.warns(RuntimeWarning, match="no home folder"):
        assert keep(found(), H200) is None
    assert load(H200) == found()


def test_without_a_home_kinds_are_kept_apart(monkeypatch):
    monkeypatch.setattr(measured, "cache_folder", lambda: None)
    h100 = "NVIDIA H100 80GB HBM3"
    with pytest.warns(RuntimeWarning, match="no home folder"):
        keep(found(), H200)
    assert load(h100) is None and not best_known(profile("nvidia-h100-80gb")).measured
    other = found(h100, memory_bandwidth=2.9e12)
    with pytest.warns(RuntimeWarning, match="no home folder"):
        keep(other, h100)
    assert (load(H200), load(h100)) == (found(), other)


def test_tables_have_units_and_sources():
    device = applied(profile("nvidia-h200"), found(), H200)
    lines = measured.table(device, profile("nvidia-h200"))
    row = next(line for line in lines if line.startswith("memory_bandwidth"))
    assert "4.30 TB/s" in row and "4.80 TB/s" in row and "measured 2026-01-31" in row
    assert any("790 TFLOP/s" in line for line in lines)
    assert any("141.00GiB" in line for line in lines)
