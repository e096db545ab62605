"""Twenty prompts of different kinds and lengths for the demo model."""

DEMO_PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "0, 1, 2, 3, 4, 5, 6, 7, 8,",
    "Q: What is the boiling point of water?\nA:",
    "The three laws of robotics are:\n1.",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "A recipe for pancakes:\n\nIngredients:\n-",
    "The quick brown fox",
    "In 1969, the first human being",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Translate to French: Good morning, my friend.\nFrench:",
    "café naïve 漢字 🔥",
    "2 + 2 =",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which plants " * 6,
    "To be, or not to be, that is the question: whether 'tis nobler in the mind",
    "The following is a list of countries and their capitals:\n"
    + "Spain: Madrid\nItaly: Rome\n" * 8,
    "a",
]
