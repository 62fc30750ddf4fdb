"""What PyTorch, CUDA, NCCL, MPI and kernels print, where it cannot be provoked without a GPU or a cluster."""

HEAD = """Traceback (most recent call last):
  File "/job/train.py", line 41, in <module>
    main()
  File "/job/train.py", line 33, in main
    loss = step(model, batch)
"""
STORAGE = HEAD + "ebbflow.infra.errors.StorageError: "

# reason -> [(exit code, text)]
PRINTED: dict[str, list[tuple[int, str]]] = {
    "gpu-out-of-memory": [
        (1, HEAD + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
            "capacity of 79.15 GiB of which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.08 "
            "GiB memory in use."),
        (1, HEAD + "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
            "some other API call, so the stacktrace below might be incorrect."),
        (1, HEAD + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        (1, HEAD + "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; 15.78 GiB "
            "total capacity; 14.31 GiB already allocated; 3.19 MiB free)"),
    ],
    "communication-error": [
        (1, HEAD + "torch.distributed.DistBackendError: NCCL error in: "
            "/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) "
            "or external library call failed or device error. \nLast error:\nsocketProgress: Connection closed by "
            "remote peer node-2<43218>"),
        (1, HEAD + "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:"
            "268, remote process exited or there was a network error, NCCL version 2.20.5\nncclRemoteError: A call "
            "failed possibly due to a network error or a remote process exiting prematurely."),
        (1, "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 1."),
    ],
    "collective-timeout": [
        (-6, "[rank1]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective "
             "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
             "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
             "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID "
             "0(default_pg) Rank 1] Process group watchdog thread terminated with exception"),
        (-6, "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG 1 Rank 1] "
             "Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective operation "
             "timeout: WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE, Timeout(ms)=600000) ran for 600061 ms"),
        (1, HEAD + "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients "
            "joined."),
    ],
    "invalid-memory-access": [
        (1, HEAD + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors "
            "might be asynchronously reported at some other API call."),
    ],
    "cuda-failure": [
        (1, HEAD + "torch.AcceleratorError: CUDA error: unspecified launch failure"),
        (1, HEAD + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, "
            "opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`"),
        (1, HEAD + "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ],
    "cuda-init-failed": [
        (1, HEAD + "RuntimeError: No CUDA GPUs are available"),
        (1, HEAD + "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. "
            "changing env variable CUDA_VISIBLE_DEVICES after program start."),
        (1, HEAD + "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        (1, HEAD + "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
            "calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"),
    ],
    "cuda-version-mismatch": [
        (1, HEAD + "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update "
            "your GPU driver"),
        (1, HEAD + "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"),
        (1, HEAD + "AssertionError: Torch not compiled with CUDA enabled"),
        (1, HEAD + "RuntimeError: \nThe detected CUDA version (11.8) mismatches the version that was used to "
            "compile\nPyTorch (12.1)."),
    ],
    "gpu-ecc-error": [
        (1, HEAD + "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        (1, "[ 1234.567] NVRM: Xid (PCI:0000:3b:00): 48, pid=3122, An uncorrectable double bit error (DBE) has been "
            "detected on GPU"),
        (1, HEAD + "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"),
        (1, "kernel: NVRM: Xid (PCI:0000:86:00): 79, GPU has fallen off the bus."),
    ],
    "storage-error": [
        (1, HEAD + "OSError: [Errno 5] Input/output error: '/mnt/data/shard-17.tar'"),
        (1, HEAD + "OSError: [Errno 116] Stale file handle: '/mnt/data/index.json'"),
        (1, HEAD + "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject "
            "operation (reached max retries: 4): Please reduce your request rate."),
        (1, HEAD + "OSError: When reading information for key 'a' in bucket 'b': AWS Error NETWORK_CONNECTION "
            "during HeadObject operation: curlCode: 28, Timeout was reached"),
        (1, STORAGE + "the run's checkpoints cannot be read (retried for 120 s): cannot list the checkpoints in "
            "file:///runs/a: Not a directory: '/runs/a'; nothing was changed"),
        (1, STORAGE + "step 70 of the run is not saved in its directory (retried for 120 s): cannot write /runs/a: "
            "No route to host; step 60 is saved"),
    ],
    "output-node-error": [
        (1, HEAD + "KeyError: \"The name 'softmax:0' refers to a Tensor which does not exist. The operation, "
            "'softmax', does not exist in the graph.\""),
        (1, HEAD + "ValueError: Output node 'logits' not found in the graph"),
        (1, HEAD + "TypeError: Fetch argument None has invalid type".replace(
            "None has invalid type", "'out' cannot be interpreted as a Tensor")),
    ],
    "semantic-error": [
        (1, HEAD + "ebbflow.planners.errors.OptionError: batch_size must be >= 1; got 0"),
        (1, HEAD + "torch.AcceleratorError: CUDA error: device-side assert triggered"),
        (1, HEAD + "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, "
            "cuda:0 and cpu!"),
    ],
    "host-out-of-memory": [
        (1, "[98765.4] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=job,task=python,pid=913"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"),
    ],
    "checkpoints-lost": [
        (1, HEAD + "ebbflow.infra.errors.CheckpointsLostError: none of the run's checkpoints is usable: "
            "file:///runs/a/checkpoints/corrupt-step-000000000096-1700000000000-0123abcd has model.pt with bytes "
            "that are not those written (its checksum differs). Nothing was deleted, and nothing is trained"),
        (1, HEAD + "ebbflow.infra.errors.CheckpointsLostError: none of the run's checkpoints is usable: step 96 "
            "was saved, and there is no finished checkpoint in s3://b/runs/a/checkpoints. Nothing was deleted"),
        (1, "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/job/a.py\", line 1, in <module>\n"
            "[rank0]: ebbflow.infra.errors.CheckpointsLostError: none of the run's checkpoints is usable: a; b"),
    ],
    "run-locked": [
        (1, HEAD + "ebbflow.infra.errors.RunLockedError: run r1 is held by process 4711 on host a since 12:00"),
        (1, HEAD + "ebbflow.infra.errors.RunLockedError: run r1 has been taken over by process 4712 on host b"),
        (1, "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/job/a.py\", line 1, in <module>\n"
            "[rank0]: ebbflow.infra.errors.RunLockedError: run r1 is held by another"),
    ],
    "model-mismatch": [
        (1, HEAD + "ebbflow.infra.errors.OtherModelError: the checkpoint is of another model: 0.weight"),
    ],
    "model-diverged": [
        (1, HEAD + "ebbflow.infra.errors.TrainingError: the gradient was not finite in 100 steps in a row, up to 7"),
    ],
    "incorrect-inputs": [
        (1, HEAD + "ebbflow.infra.errors.DatasetError: a data set of 10 samples is smaller than the batch of 32"),
    ],
    "core-dump": [(134, "train.sh: line 3:  4711 Aborted                 (core dumped) python train.py")],
}  # fmt: skip

# (what it looks like, what it is, exit code, text)
NEAR_MISSES: list[tuple[str, str, int, str]] = [
    ("cancelled", "traceback", 1, HEAD + "RuntimeError: the job was cancelled by its own watchdog"),
    ("gpu-ecc-error", "no-signature", 7, "ECC: enabled, uncorrectable errors so far: 0"),
    ("host-out-of-memory", "traceback", 1, HEAD + "ValueError: memory bank is empty"),
    ("gpu-out-of-memory", "traceback", 1, HEAD + "RuntimeError: out of memory cells in the replay buffer"),
    ("no-space", "traceback", 1, HEAD + "OSError: [Errno 24] Too many open files: 'a.bin'"),
    ("checkpoints-lost", "traceback", 1, HEAD + "RuntimeError: two checkpoints lost their optimizer"),
    ("run-locked", "traceback", 1, HEAD + "RuntimeError: the run is locked in at 8 GPUs"),
    ("cannot-load-libraries", "import-error", 1, HEAD + "ModuleNotFoundError: No module named 'libcudnn'"),
    ("syntax-error", "incorrect-inputs", 1, HEAD + "json.decoder.JSONDecodeError: invalid syntax in line 1"),
    ("import-error", "traceback", 1, HEAD + "RuntimeError: cannot import the weights of layer 3"),
    ("cuda-version-mismatch", "traceback", 1, HEAD + "ValueError: checkpoint format version 3 mismatches 4"),
    ("cuda-init-failed", "gpu-out-of-memory", 1, HEAD + "RuntimeError: CUDA error: out of memory"),
    ("model-diverged", "no-signature", 9, "epoch 3: validation loss 0.231, nan-safe mean 0.24"),
    ("model-mismatch", "semantic-error", 1, HEAD + "TypeError: load_state_dict() takes 2 positional arguments"),
    ("collective-timeout", "traceback", 1, HEAD + "TimeoutError: the feature server did not answer in 30 s"),
    ("communication-error", "no-signature", 4, "NCCL INFO Connected all rings\nNCCL version 2.27.5+cuda12.9"),
    ("incorrect-inputs", "traceback", 1, HEAD + "IndexError: list index out of range"),
    ("permission-error", "traceback", 1, HEAD + "RuntimeError: the model has no permission to see fold 3"),
    ("checkpoint-error", "incorrect-inputs", 1, HEAD + "FileNotFoundError: [Errno 2] No such file: 'last.ckpt'"),
    ("storage-error", "permission-error", 1, STORAGE + "cannot list s3://b/k: access denied; check the keys"),
    ("storage-error", "permission-error", 1, STORAGE + "cannot list s3://b: the AWS credentials have expired"),
    ("storage-error", "checkpoint-error", 1, STORAGE.replace("StorageE", "UnusableCheckpointE")
        + "/runs/a has model.pt with bytes that are not those written"),
    ("storage-error", "traceback", 1, STORAGE.replace("StorageE", "UnusableCheckpointE")
        + "/runs/a has an index of version 9, not 1"),
    ("storage-error", "no-space", 1, STORAGE.replace("StorageE", "StorageFullE") + "cannot write to /runs/a"),
    ("storage-error", "incorrect-inputs", 1, HEAD + "FileNotFoundError: [Errno 2] No such file: '/mnt/data/a'"),
    ("invalid-memory-access", "traceback", 1, HEAD + "RuntimeError: illegal access to the memory of head 2"),
    ("cuda-failure", "semantic-error", 1, HEAD + "torch.AcceleratorError: CUDA error: device-side assert triggered"),
    ("output-node-error", "traceback", 1, HEAD + "RuntimeError: node 3 gave no output"),
    ("semantic-error", "traceback", 1, HEAD + "ValueError: learning rates must match the schedule"),
    ("core-dump", "no-signature", 2, "core dumps are written to /var/crash"),
    ("traceback", "no-signature", 1, "see the traceback in the file named above"),
    ("traceback", "no-signature", 1, "Traceback (most recent call last):\n  File \"/job/train.py\", line 3, in f"),
    ("traceback", "no-signature", 1, "Traceback (most recent call last):\n  File \"/opt/torchrun\", line 8, in main\n"
     "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n======\ntrain.py FAILED"),
    ("no-signature", "traceback", 1, HEAD + "Stopped"),
]  # fmt: skip
