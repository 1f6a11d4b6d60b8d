"""The code behind the book: one chapter, one module, the same name.

    chapter            module        what it holds
    01_environment     environment   device choice, seeds, determinism, versions
    02_tensors         tensors       strides, broadcasting step by step, which operation copies
    04_models          models        plain modules that later chapters transform from outside
    05_data            data          MNIST from three places, augmentation, batches that resume
    06_training        training      the Trainer: AMP, accumulation, clipping, exact resume
    07_mnist           mnist         the recipe, evaluation, inference on a drawn digit

Shared by all chapters: exercises (instant checks), figures (sliders and plots),
ledger (claims and their results), records (measurements with provenance).

Importing `helpers` imports nothing else; import the module that you need.
"""
