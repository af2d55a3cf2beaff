// Gloo over TCP on the loopback interface (it has no shared-memory transport), as PyTorch sets it up.
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/stat.h>
#include "loop.h"

static std::shared_ptr<gloo::rendezvous::Context> context;

// Gloo's reduce-scatter works in place on a buffer fixed beforehand: a working copy makes it out of place like the others.
static struct {
	std::unique_ptr<gloo::ReduceScatterHalvingDoubling<float>> algorithm;
	std::vector<float> work;
	size_t count = 0;
} scatter;

extern "C" int peer_start(const char *dir, int *rank, int *nranks)
try {
	gloo::transport::tcp::attr attr;
	attr.iface = "lo";
	auto device = gloo::transport::tcp::CreateDevice(attr);
	const std::string meeting = std::string(dir) + "/gloo";
	mkdir(meeting.c_str(), 0700);
	gloo::rendezvous::FileStore store(meeting);
	context = std::make_shared<gloo::rendezvous::Context>(*rank, *nranks);
	context->connectFullMesh(store, device);
	return 0;
} catch (const std::exception &e) {
	std::fprintf(stderr, "Gloo: %s\n", e.what());
	return -1;
}

extern "C" int peer_barrier(void)
try {
	gloo::BarrierOptions options(context);
	gloo::barrier(options);
	return 0;
} catch (const std::exception &e) {
	std::fprintf(stderr, "Gloo: %s\n", e.what());
	return -1;
}

static void all_reduce(float *in, float *out, size_t count)
{
	gloo::AllreduceOptions options(context);
	options.setInput(in, count);
	options.setOutput(out, count);
	options.setReduceFunction(static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
	gloo::allreduce(options);
}

static void reduce_scatter(float *in, float *out, size_t count)
{
	const size_t all = count * context->size;
	if (scatter.count != count) {
		scatter.algorithm.reset();
		scatter.work.assign(all, 0);
		scatter.count = count;
		scatter.algorithm = std::make_unique<gloo::ReduceScatterHalvingDoubling<float>>(context,
			std::vector<float *>{ scatter.work.data() }, static_cast<int>(all), std::vector<int>(context->size, static_cast<int>(count)));
	}
	std::memcpy(scatter.work.data(), in, all * sizeof(float));
	scatter.algorithm->run();
	std::memcpy(out, scatter.work.data(), count * sizeof(float));
}

extern "C" int peer_call(enum peer_collective which, float *in, float *out, size_t count)
try {
	switch (which) {
	case PEER_ALL_REDUCE:
		all_reduce(in, out, count);
		return 0;
	case PEER_ALL_GATHER: {
		gloo::AllgatherOptions options(context);
		options.setInput(in, count);
		options.setOutput(out, count * context->size);
		gloo::allgather(options);
		return 0;
	}
	case PEER_REDUCE_SCATTER:
		reduce_scatter(in, out, count);
		return 0;
	case PEER_BROADCAST: {
		gloo::BroadcastOptions options(context);
		options.setOutput(out, count);
		options.setRoot(0);
		gloo::broadcast(options);
		return 0;
	}
	case PEER_ALL_TO_ALL: {
		gloo::AlltoallOptions options(context);
		options.setInput(in, count * context->size);
		options.setOutput(out, count * context->size);
		gloo::alltoall(options);
		return 0;
	}
	default:
		return -1;
	}
} catch (const std::exception &e) {
	std::fprintf(stderr, "Gloo: %s\n", e.what());
	return -1;
}

extern "C" void peer_stop(void)
{
	scatter.algorithm.reset();
	context.reset();
}
