/* SPDX-License-Identifier: Apache-2.0 */
/* Which backends of sluice serve under the names of NIXL's plugins. */
#ifndef SLUICE_NIXL_PLUGINS_H
#define SLUICE_NIXL_PLUGINS_H

#include <stdlib.h>
#include <unistd.h>

#include <set>
#include <sstream>

#include "sluice_ranges.h"

/* A program's handle of a backend. */
class nixlBackendH
{
public:
	std::string type;
	nixl_b_params_t params;
};

namespace sluice_nixl
{

struct plugin {
	const char *name;
	nixl_mem_list_t mems;
	std::vector<const char *> opens; /* the last letter ?: where it can be had */
	bool remote;
	bool options; /* its parameters are options of its backend, as sluice.h lists them */

	bool serves(nixl_mem_t kind) const
	{
		return std::find(mems.begin(), mems.end(), kind) != mems.end();
	}
};

/* The same as the Python face's. SHM, TCP, RDMA and CUDA are sluice's own names. */
inline const std::vector<plugin> &plugins()
{
	static const std::vector<plugin> list = {
		{"UCX", {DRAM_SEG, VRAM_SEG}, {"shm?", "cuda?", "rdma?", "tcp?"}, true, false},
		{"POSIX", {DRAM_SEG, FILE_SEG, BLK_SEG}, {"posix"}, false, true},
		{"GDS", {DRAM_SEG, VRAM_SEG, FILE_SEG, BLK_SEG}, {"cuda?", "posix"}, false, false},
		{"GDS_MT", {DRAM_SEG, VRAM_SEG, FILE_SEG, BLK_SEG}, {"cuda?", "posix"}, false,
		 false},
		{"SHM", {DRAM_SEG}, {"shm"}, true, true},
		{"TCP", {DRAM_SEG}, {"tcp"}, true, true},
		{"RDMA", {DRAM_SEG, VRAM_SEG}, {"rdma"}, true, true},
		{"CUDA", {DRAM_SEG, VRAM_SEG}, {"cuda"}, false, true},
	};
	return list;
}

inline const plugin *plugin_of(const std::string &name)
{
	for (const plugin &p : plugins())
		if (name == p.name)
			return &p;
	return nullptr;
}

/* The options of a backend for the parameters of a plugin. POSIX: NIXL's words for the queue. */
inline std::vector<std::string> options_of(const plugin &p, const nixl_b_params_t &params)
{
	static const std::set<std::string> words = {"use_uring", "use_aio", "use_posix_aio",
						    "ios_pool_size", "kernel_queue_size"};
	std::vector<std::string> out;
	auto says = [&](const char *word) {
		auto at = params.find(word);
		return at == params.end() ? 0 : at->second == "true" || at->second == "1" ? 1 : -1;
	};
	if (!p.options)
		return out;
	for (const auto &param : params)
		if (!words.count(param.first))
			out.push_back(param.first + "=" + param.second);
	int uring = says("use_uring");
	if (uring < 0 || (uring == 0 && (says("use_aio") > 0 || says("use_posix_aio") > 0)))
		out.push_back("path=threads");
	return out;
}

/*
 * The backends that serve the network devices which UCX is told to use, by a parameter of the
 * plugin or of UCX itself, and their devices. A device such as mlx5_0:1 is one of RDMA; the others
 * are network interfaces.
 */
inline std::map<std::string, std::vector<std::string>> of_devices(const nixl_b_params_t &params)
{
	std::map<std::string, std::vector<std::string>> out;
	std::string list, device;
	for (const char *word : {"ucx_devices", "device_list"})
		if (list.empty() && params.count(word))
			list = params.at(word);
	std::replace(list.begin(), list.end(), ',', ' ');
	for (std::istringstream words(list); words >> device;) {
		std::string nic = "/sys/class/infiniband/" + device.substr(0, device.find(':'));
		out["ucx"].push_back(device);
		if (nic.back() != '/' && access(nic.c_str(), F_OK) == 0)
			out["rdma"].push_back(device);
	}
	return out;
}

/*
 * How long a transfer may go without progress, in ns. NIXL has no such limit, and programs count on
 * it that a process which its host keeps off the processors is waited for.
 */
inline int64_t transfer_timeout()
{
	const char *said = getenv("SLUICE_TRANSFER_TIMEOUT");
	double seconds = said ? strtod(said, nullptr) : 0;
	return int64_t((seconds > 0 && seconds <= 86400 ? seconds : 120) * 1e9);
}

inline int open_list(const std::string &name, const std::vector<sluice_backend> &list,
		     sluice_engine *engine)
{
	struct sluice_config config = {};
	config.size = sizeof config;
	std::string called = name.substr(0, 255); /* an engine's name has no more bytes */
	while (called.size() < name.size() && (name[called.size()] & 0xc0) == 0x80)
		called.pop_back(); /* up to a whole character */
	config.name = called.c_str();
	config.backends = list.data(), config.backends_count = list.size();
	config.transfer_timeout_ns = transfer_timeout();
	config.connect_timeout_ns = 120 * int64_t(1000000000);
	config.transfers_max = 1 << 20, config.peers_max = 1 << 16;
	config.notifications_max = 1 << 16;
	return sluice_open(&config, engine);
}

/* Whether one of those backends opens with one of its devices; SLUICE_OK where none is named. */
inline int try_devices(const std::string &name, const nixl_b_params_t &params)
{
	int code = SLUICE_OK;
	for (const auto &of : of_devices(params))
		for (const std::string &device : of.second) {
			std::string option = "devices=" + device;
			const char *options[] = {option.c_str(), nullptr};
			sluice_engine e;
			code = open_list(name, {{of.first.c_str(), options, 0, 0}}, &e);
			if (code == SLUICE_OK)
				return sluice_close(e);
		}
	return code;
}

/* Opens the backends of these plugins, and cuda for these cards. */
inline int open_engine(const std::string &name,
		       const std::vector<std::unique_ptr<nixlBackendH>> &chosen,
		       const std::set<uint64_t> &cards, sluice_engine *engine)
{
	struct setup {
		bool needed = false;
		std::vector<std::string> options;
		std::vector<const char *> ended; /* by NULL */
	};
	std::map<std::string, setup> setups;
	for (const auto &b : chosen)
		for (std::string word : plugin_of(b->type)->opens) {
			bool optional = word.back() == '?';
			if (optional)
				word.pop_back();
			setup &s = setups[word];
			s.needed = s.needed || !optional;
			for (const std::string &o : options_of(*plugin_of(b->type), b->params))
				s.options.push_back(o);
		}
	std::map<std::string, std::vector<std::string>> named;
	for (const auto &b : chosen)
		if (b->type == std::string("UCX"))
			named = of_devices(b->params);
	for (const char *net : {"rdma", "tcp"})
		if (!named.empty() && setups.count(net) && !setups[net].needed)
			setups.erase(net); /* it would take all NICs, or go by any network */
	for (const auto &of : named) {
		std::string devices = "devices=";
		for (const std::string &d : of.second)
			devices += (devices.back() == '=' ? "" : ",") + d;
		setups[of.first].options.push_back(devices);
	}
	if (setups.count("cuda") && !cards.empty()) {
		setups["cuda"].needed = true;
		for (uint64_t card : cards)
			setups["cuda"].options.push_back("devices=" + std::to_string(card));
	} else if (setups.count("cuda") && !setups["cuda"].needed) {
		setups.erase("cuda"); /* it would take memory of every card for nothing */
	}
	std::vector<sluice_backend> list;
	/* Earlier ones win. */
	for (const char *b : {"shm", "cuda", "rdma", "ucx", "tcp", "posix"}) {
		auto at = setups.find(b);
		if (at == setups.end())
			continue;
		setup &s = at->second;
		for (const std::string &o : s.options)
			s.ended.push_back(o.c_str());
		s.ended.push_back(nullptr);
		uint32_t flags = s.needed ? 0 : uint32_t{SLUICE_OPTIONAL};
		list.push_back({b, s.ended.data(), flags, 0});
	}
	return open_list(name, list, engine);
}

} // namespace sluice_nixl

#endif
