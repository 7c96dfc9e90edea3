"""The built-in backends against the kit that any backend inherits."""

import pytest
import torch

from dagengine_kernels import get_backend
from dagengine_kernels.conformance import AttentionBackendConformance
from dagengine_kernels.fused import native


class TestReference(AttentionBackendConformance):
    float32_tolerance = 1e-7

    def make_backend(self):
        return get_backend("reference")


class TestReferenceFloat32(AttentionBackendConformance):
    random_cases = 5

    def make_backend(self):
        return get_backend("reference", compute_dtype=torch.float32)


class TestSegmented(AttentionBackendConformance):
    random_cases = 40

    def make_backend(self):
        return get_backend("segmented")


class TestSegmentedInPlace(AttentionBackendConformance):
    """Every whole page that can be is read in place, however few there are."""

    random_cases = 40

    def make_backend(self):
        return get_backend("segmented", in_place_tokens=1, in_place_page_size=1)


class FusedOnCpu(AttentionBackendConformance):
    """Every instruction set that this machine has is held to the kit on its own."""

    random_cases = 40
    isa: str

    def make_backend(self):
        if native.why_missing():
            pytest.skip(native.why_missing())
        if self.isa not in native.load().cpu.isas():
            pytest.skip(f"this machine does not run {self.isa}")
        return get_backend("fused", implementation="cpu", isa=self.isa)


class TestFusedAvx512(FusedOnCpu):
    isa = "avx512"


class TestFusedAvx2(FusedOnCpu):
    isa = "avx2"


class TestFusedPortable(FusedOnCpu):
    isa = "portable"


class TestPacked(AttentionBackendConformance):
    # A moved copy of K is rounded to bf16 a second time.
    bfloat16_factor = 2.0

    def make_backend(self):
        return get_backend("packed")


class TestNaive(AttentionBackendConformance):
    bfloat16_factor = 2.0

    def make_backend(self):
        return get_backend("naive")


class TestTheKitIsNotVacuous:
    """A backend with one fault each must fail the kit."""

    @pytest.mark.parametrize("fault", ["lse-base", "delta-ignored", "sinks-twice"])
    def test_faults_are_found(self, fault):
        import dagengine_kernels.reference as module

        class Faulty(module.ReferenceBackend):
            def _rotate(self, x, positions, rotary, *, scaled):
                if fault == "delta-ignored" and not scaled:
                    return x
                return super()._rotate(x, positions, rotary, scaled=scaled)

            def run(self, plan, layer, q, kv_layer, *, sinks=None, return_lse=False):
                if fault == "sinks-twice" and sinks is not None:
                    sinks = sinks + 0.7
                result = super().run(plan, layer, q, kv_layer, sinks=sinks, return_lse=return_lse)
                if fault == "lse-base" and return_lse:
                    return result[0], result[1] * 0.6931472
                return result

        kit = TestReference()
        with pytest.raises(AssertionError):
            kit.test_matches_the_definition(Faulty(), "sinks")
