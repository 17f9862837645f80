/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs that test nixl.h share: agents with memory, and how they move it. */
#ifndef NIXL_SIDE_H
#define NIXL_SIDE_H

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <nixl.h>

inline void need(bool condition, const char *what, const char *file, int line)
{
	if (condition)
		return;
	std::fprintf(stderr, "%s:%d: %s is false\n", file, line, what);
	std::exit(1);
}
#define NEED(c) need(c, #c, __FILE__, __LINE__)
#define OK(call) NEED((call) == NIXL_SUCCESS)

constexpr size_t N = 1 << 20;

inline nixlBlobDesc whole(std::vector<char> &bytes)
{
	return nixlBlobDesc(reinterpret_cast<uintptr_t>(bytes.data()), bytes.size(), 0, "");
}

inline nixl_xfer_dlist_t blocks(std::vector<char> &of, const std::vector<size_t> &at, size_t n)
{
	nixl_xfer_dlist_t list(DRAM_SEG);
	for (size_t i : at)
		list.addDesc(nixlBasicDesc(reinterpret_cast<uintptr_t>(of.data()) + i, n, 0));
	return list;
}

struct side {
	nixlAgent agent;
	std::vector<char> bytes = std::vector<char>(N);
	nixl_reg_dlist_t memory{DRAM_SEG};
	nixlBackendH *backend = nullptr;

	side(const char *name, const char *type, bool telemetry = false, uint16_t port = 0)
		: agent(name, config(telemetry, port))
	{
		nixl_b_params_t params;
		nixl_mem_list_t mems;
		OK(agent.getPluginParams(type, mems, params));
		OK(agent.createBackend(type, params, backend));
		memory.addDesc(whole(bytes));
		nixl_opt_args_t extra;
		extra.backends.push_back(backend);
		OK(agent.registerMem(memory, &extra));
	}
	static nixlAgentConfig config(bool telemetry, uint16_t port)
	{
		nixlAgentConfig c(true, port != 0, port);
		c.captureTelemetry = telemetry;
		return c;
	}
};

inline void meet(side &from, side &to, const char *name)
{
	nixl_blob_t blob;
	std::string got;
	OK(to.agent.getLocalMD(blob));
	OK(from.agent.loadRemoteMD(blob, got));
	NEED(got == name);
}

inline nixl_status_t finish(nixlAgent &agent, nixlXferReqH *r, const nixl_opt_args_t *a = nullptr)
{
	nixl_status_t s = agent.postXferReq(r, a);
	while (s == NIXL_IN_PROG) {
		std::this_thread::yield();
		s = agent.getXferStatus(r);
	}
	return s;
}

inline std::vector<nixl_blob_t> heard(side &by, const char *from, size_t n)
{
	nixl_notifs_t map;
	while (map[from].size() < n)
		OK(by.agent.getNotifs(map));
	NEED(map.size() == 1 && map[from].size() == n);
	return map[from];
}

// A call that waits a second for a peer. It is made again where that second was over, since this
// process may stand still for longer; another failure is one.
template <typename F> nixl_status_t patient(F call)
{
	using clock = std::chrono::steady_clock;
	auto start = clock::now();
	nixl_status_t s = call();
	if (clock::now() - start < std::chrono::milliseconds(900))
		return s;
	while (s < 0 && clock::now() - start < std::chrono::seconds(60)) {
		std::this_thread::sleep_for(std::chrono::milliseconds(10));
		s = call();
	}
	return s;
}

inline nixl_status_t tell(side &from, const char *name, const std::string &message)
{
	return patient([&] { return from.agent.genNotif(name, message); });
}

#endif
