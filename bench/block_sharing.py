"""`jpaged bench block-sharing`: memory that samples and beams save by sharing blocks.

Short instructions and answers of about the lengths of the Alpaca data (19 tokens in, 58 out), as
in the PagedAttention paper (Kwon et al. 2023, figures 14 and 15). Only blocks shared by the answers
to one prompt count: the prefix cache is off. Memory saved is the blocks that need not exist, out
of those that all answers would hold alone.
"""

from jpaged.beam_search_params import BeamSearchParams
from jpaged.bench.options import ModelOptions
from jpaged.inputs import Params
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

NUM_OUTPUT_TOKENS = 58
INSTRUCTIONS = [
    "Give three tips for staying healthy.",
    "What are the three primary colors, and why are they called that?",
    "Describe the structure of an atom in simple words for a child.",
    "How can we reduce air pollution in large cities?",
    "Describe a time when you had to make a difficult decision.",
    "Identify the odd one out: Twitter, Instagram, Telegram.",
    "Explain why the fraction 4/16 is equivalent to 1/4.",
    "Write a short story in third person about a lonely lighthouse keeper.",
    "Render a 3D model of a house and describe what it looks like.",
    "Evaluate this sentence for spelling and grammar mistakes: He finnished his meal.",
    "How did Julius Caesar die? Answer in two sentences.",
    "What is the capital of France, and what is it known for?",
    "Generate a list of ten items a person might need for a camping trip.",
    "Discuss the causes of the Great Depression.",
    "Explain the use of word embeddings in natural language processing.",
    "Reverse engineer this code to create a new version of it: print(1 + 2)",
]


def bench_block_sharing(options: ModelOptions) -> None:
    """Print the share of blocks saved with 2, 4 and 6 samples or beams a prompt."""
    llm = LLM(options.model, max_model_len=256, max_num_seqs=48, enable_prefix_caching=False)
    lengths = {"max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True}
    for width in (2, 4, 6):
        sampled = saved(llm, SamplingParams(n=width, seed=width, **lengths))
        beams = saved(llm, BeamSearchParams(beam_width=width, **lengths))
        print(
            f"{width} answers: {sampled:5.1%} saved, {width} beams: {beams:5.1%} saved", flush=True
        )


def saved(llm: LLM, params: Params) -> float:
    """Compute the share of the blocks that sharing saves while all instructions are answered."""
    engine = llm.engine
    for number, text in enumerate(INSTRUCTIONS):
        engine.add_request(engine.make_request(str(number), f"{text}\n", params))
    num_used = num_alone = 0
    while engine.has_unfinished:
        engine.step()
        num_used += engine.core.block_pool.num_used
        num_alone += sum(len(request.block_ids) for request in engine.core.scheduler.running)
    return 1 - num_used / num_alone
