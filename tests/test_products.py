"""Products of matrices by either library."""

import pytest
import torch

from zoo import products


@pytest.mark.parametrize("slow", [True, False], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (130, 64, 48), (2, 1, 33), (1, 40, 2), (5, 70, 9)])
def test_each_row_times_each_row(monkeypatch, slow, dtype, shape):
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: slow)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, shape[2], generator=generator, dtype=dtype) for rows in shape[:2])
    found = products.row_products(a, b)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-5)
    part = products.row_products(a[: shape[0] // 2 + 1], b)  # rows of a larger matrix
    torch.testing.assert_close(part, found[: shape[0] // 2 + 1])


def test_another_makers_processor_is_told_by_what_linux_says(monkeypatch, tmp_path):
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        pytest.skip("this torch has one of the libraries alone")
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(products, "_CPUINFO", file)

    def slow(capability: str, text: str | None) -> bool:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        file.write_text(text) if text is not None else file.unlink(missing_ok=True)
        return products._mkl_is_slow.__wrapped__()

    assert slow("AVX512", "vendor_id\t: AuthenticAMD\n")
    assert not slow("AVX512", "vendor_id\t: GenuineIntel\n")
    assert not slow("AVX2", "vendor_id\t: AuthenticAMD\n")
    assert not slow("AVX512", None)
