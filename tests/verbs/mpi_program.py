"""An MPI program for the software card: sums over all ranks and messages in a ring, of sizes that go by each of UCX's protocols, checked
value by value. Open MPI's library is called directly (ctypes), so that no compiler wrapper and no headers are needed. Says how many bytes
of data went out from this rank at least, so that whoever started it can tell that they crossed the card."""
import array
import ctypes
import os

mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)


def handle(name):
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))


WORLD, DOUBLE, SUM = handle("ompi_mpi_comm_world"), handle("ompi_mpi_double"), handle("ompi_mpi_op_sum")


def call(name, *arguments):
    status = getattr(mpi, name)(*arguments)
    if status:
        raise SystemExit(f"{name} says {status}")


def number(name):
    value = ctypes.c_int()
    call(name, WORLD, ctypes.byref(value))
    return value.value


def at(values):
    return ctypes.c_void_p(values.buffer_info()[0])


call("MPI_Init", None, None)
rank, ranks = number("MPI_Comm_rank"), number("MPI_Comm_size")
sent = 0
for count in (1, 100, 3000, 100000):
    mine, sums, got = array.array("d", (rank + k for k in range(count))), array.array("d", bytes(8 * count)), array.array("d", bytes(8 * count))
    wanted = array.array("d", (ranks * (ranks - 1) / 2 + ranks * k for k in range(count)))
    left = (rank - 1) % ranks
    theirs = array.array("d", (left + k for k in range(count)))
    for again in range(5):
        call("MPI_Allreduce", at(mine), at(sums), count, DOUBLE, SUM, WORLD)
        if sums != wanted:
            raise SystemExit(f"rank {rank}: a sum of {count} is wrong")
        call("MPI_Sendrecv", at(mine), count, DOUBLE, (rank + 1) % ranks, again, at(got), count, DOUBLE, left, again, WORLD, None)
        if got != theirs:
            raise SystemExit(f"rank {rank}: a message of {count} is wrong")
        # What a sum takes at the least, and the message.
        sent += int(8 * count * (2 * (ranks - 1) / ranks + 1))
        sums, got = array.array("d", bytes(8 * count)), array.array("d", bytes(8 * count))
call("MPI_Barrier", WORLD)
os.write(1, f"rank {rank} of {ranks}: {sent} bytes\n".encode())
call("MPI_Finalize")
