"""How many pages and expert slots a GPU holds, before anything is allocated.

python examples/plan_capacity.py
"""

from fp8kv_inductor import CacheConfig, KVPools
from fp8kv_inductor.budget import plan_capacity, plan_pages

GiB = 1 << 30


def main() -> None:
    print("V4-Flash, two GPUs of 48 GiB, requests of 65,536 tokens")
    for mode in ("auto", "fp8_e4m3"):
        cache = CacheConfig.resolve("v4-flash", mode, device="cpu")
        plan = plan_capacity(cache, 48 * GiB, tp=2, context=65536)
        print(
            f"{mode:>10}: {plan.pages.num_pages} pages of {cache.page_size} tokens, "
            f"{plan.pages.requests(65536):.1f} requests, {plan.expert_slots} expert slots, "
            f"{plan.tier_bytes['workspace'] / GiB:.1f} GiB left for activations"
        )
    # The same plan later allocates the pools, here those of a model that fits anywhere.
    tiny = CacheConfig.resolve("tiny", "fp8_e4m3", device="cpu")
    pages = plan_pages(tiny, budget=4 << 20)
    assert KVPools(pages).nbytes() == pages.nbytes
    print(f"tiny: {pages.tokens} tokens in {pages.nbytes} bytes, as planned and as allocated")


if __name__ == "__main__":
    main()
