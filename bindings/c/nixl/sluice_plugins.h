/* SPDX-License-Identifier: Apache-2.0 */
/* Which backends of sluice serve under the names of NIXL's plugins. */
#ifndef SLUICE_NIXL_PLUGINS_H
#define SLUICE_NIXL_PLUGINS_H

#include <set>

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
		{"UCX", {DRAM_SEG, VRAM_SEG}, {"shm", "cuda?", "rdma?", "tcp?"}, true, false},
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
	if (setups.count("cuda") && !cards.empty()) {
		setups["cuda"].needed = true;
		for (uint64_t card : cards)
			setups["cuda"].options.push_back("devices=" + std::to_string(card));
	} else if (setups.count("cuda") && !setups["cuda"].needed) {
		setups.erase("cuda"); /* it would take memory of every card for nothing */
	}
	std::vector<sluice_backend> list;
	for (const char *b : {"shm", "cuda", "rdma", "tcp", "posix"}) { /* earlier ones win */
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
	struct sluice_config config = {};
	config.size = sizeof config;
	config.name = name.c_str();
	config.backends = list.data(), config.backends_count = list.size();
	config.transfers_max = 1 << 20, config.peers_max = 1 << 16;
	config.notifications_max = 1 << 16;
	return sluice_open(&config, engine);
}

} // namespace sluice_nixl

#endif
