"""Registration in other processes: import orders, no triton, workers by fork and by spawn."""

import subprocess
import sys
import textwrap

STORE = """
import torch

def check():
    from fp8kv_inductor import Pool, store
    rows, slots = torch.randn(3, 64), torch.tensor([2, -1, 5])
    pools = [Pool.empty(8, 64, "fp8_e4m3") for _ in range(2)]
    from torch._inductor.utils import run_and_get_code
    store(rows, slots, pools[0])
    torch._dynamo.reset()
    compiled = torch.compile(store, fullgraph=True, options={"cpp.simdlen": 1})
    _, (code,) = run_and_get_code(compiled, rows, slots, pools[1])
    assert all(map(torch.equal, pools[0].buffers(), pools[1].buffers())) and pools[0].data.any()
    return "write_rows.default(" in code
"""
"""``check()``: compiled bytes equal eager's; whether the store was lowered."""


def run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", STORE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_inductor_before_us_and_registration_behind_a_graph():
    """Inductor has compiled for others, and for our operators without their lowerings."""
    run("""
        torch.compile(lambda x: x + 1)(torch.ones(2))
        import fp8kv_inductor.ops
        slots, scale = torch.tensor([1]), torch.zeros(4, 2, dtype=torch.float16)
        data = torch.zeros(4, 64, dtype=torch.uint8)
        rows = torch.ones(1, 64)

        def step():
            torch.ops.fp8kv.store(rows, slots, data, scale, "fp8_e4m3")

        torch.compile(step, fullgraph=True)()
        assert data[1].all()
        assert check()
    """)


def test_lowerings_first_and_registration_again():
    run("""
        import fp8kv_inductor.lowerings
        import fp8kv_inductor
        for _ in range(3):
            fp8kv_inductor.register()
        assert check()
        fp8kv_inductor.register()
        assert check()
    """)


def test_without_triton():
    """A CPU wheel of torch brings none: one warning, and reads stay eager in compiled graphs."""
    printed = run("""
        import sys
        import warnings
        sys.modules["triton"] = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert check()
        print(*[w.message for w in caught if "right but slower" in str(w.message)], sep="\\n")
    """)
    (warning,) = printed.splitlines()
    assert "attention: import of triton halted" in warning and "rows:" not in warning


def test_forked_workers():
    """The parent has registered and compiled; a child compiles for itself."""
    run("""
        import os
        torch.set_num_threads(1)
        assert check()
        child = os.fork()
        if not child:
            os._exit(0 if check() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert check()
    """)


def test_spawned_workers(tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(
        STORE
        + textwrap.dedent("""
        if __name__ == "__main__":
            import concurrent.futures
            import multiprocessing
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, context) as workers:
                assert workers.submit(check).result()
    """)
    )
    subprocess.run([sys.executable, script], check=True, timeout=240)
