"""The code behind the book: a chapter calls the module of the same name.

    chapter            module          what it holds
    00_start           –               everything stands in the notebook itself
    01_environment     environment     device choice, seeds, determinism, versions
    02_tensors         tensors         strides, storages, and which operations copy
    03_autograd        autograd        an engine of one's own that agrees with PyTorch
    04_models          models          plain modules that later chapters transform from outside
                       layers          five layers of one's own, equal to PyTorch's
    05_data            data            MNIST from three places, batches that resume, buckets
                       loading         datasets for workers, a model of the wait, copies ahead
                       augmentation    rotations and shifts for a whole batch at once
    06_training        training        the Trainer: AMP, accumulation, clipping, DDP, exact resume
                       checkpoint      files that are atomic to write and safe to read
                       schedules       learning rates as functions of the step
                       callbacks       progress bar, history, TensorBoard, checkpoints, early stop
    07_mnist           mnist           the recipe, its evaluation, a digit that you draw
    08_gradients       gradients       hooks that remove themselves, a monitor, custom gradients
    09_memory          memory          the bytes of training: saved, alive, at the peak; predicted
                       allocator       a small caching allocator; CUDA memory snapshots to read
                       budget          the bytes of a GPT's step by formula, part by part
    09_memory_savings  memory_savings  exact accumulation, checkpointing from outside, largest batch
    10_precision       precision       floats bit by bit, a loss scaler to read, what autocast does
    11_profiling       profiling       clocks, profiles as rows, exact counts, the roofline
    12_compilation     compilation     graph breaks, recompiles and kernels counted; break-even
    13_kernels         kernels         softmax, norms, matmul, attention… in Triton, a file each
    14_distributed     distributed     ranks started from a notebook, joined in a process group
                       ranks           what they print, who of them failed first
                       data_parallel   DDP's buckets on a timeline with backward
    14_distributed_scaling  distributed_scaling  all-reduces through one rank and in two levels
                       collectives     ring and tree all-reduce, step by step, and what they cost
    15_sharding        sharding        FSDP2 and the bytes that each rank holds
                       tensor_parallel  layers split by hand and by DTensor; sequence parallel
                       pipeline        stages, GPipe and 1F1B as data, and their bubble
                       resharding      checkpoints of parts, for another number of ranks
                       train_gpt       all of it as a program: GPT, text, torchrun, resume
    16_quantization    quantization    grids of integers, calibration, integer products, QAT, int4
    17_export          export          a guarded export, parity, ONNX graphs as rows, latency
    18_serving         serving         the server: checks, limits, versions, metrics, graceful stop
                       batching        an asyncio batcher: one call of the model for many requests
                       server_process  a server started, waited for and stopped with its children
    18_serving_load    serving_load    a load test at scheduled times, percentiles and their range
                       queueing        how long requests wait: M/D/1, the batcher simulated, costs
                       litserve_digits  the same model on LitServe
                       ray_digits      the same model on Ray Serve
                       torchserve_digits  the same model on TorchServe
    19_ecosystem       ecosystem       one job in five programs; what a library adds, in bytes
                       ecosystem_job   the model, optimizer and loader of that job
                       embeddings      tokens, vectors and a search with a pretrained model
                       operations      model cards, fingerprints of files, a watch for drift
    20_differentiable  differentiable  simulators with gradients; fits, error bars, search budgets
    20_differentiable_programs  differentiable_programs  bounces, a renderer, a planner, RK4

Beside the lessons:

    timing             the only clock: wait for the device, quantiles, calls compared in turns
    exercises/         the instant check; reference and cases of each exercise, a file a chapter
    pictures/          what a chapter draws, under the chapter's name; draw.py has what they share
    launch/            files that start the training program under Slurm and Kubernetes
    page/              what makes a notebook a page of this book: sliders, claims, records, the
                       drawing pad, bits to click on, decision trees

A lesson imports lessons and `timing`, and nothing of the other rooms; `page` imports no lesson.

Importing `helpers` imports nothing else; import the module that you need.
"""
