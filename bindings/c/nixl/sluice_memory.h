/* SPDX-License-Identifier: Apache-2.0 */
/* The part of an agent that has backends, an engine over them, and memory. See nixl.h. */
#ifndef SLUICE_NIXL_MEMORY_H
#define SLUICE_NIXL_MEMORY_H

#include <sys/stat.h>

#include <fcntl.h>

#include <condition_variable>
#include <list>
#include <mutex>

#include "nixl_params.h"
#include "sluice_plugins.h"

namespace sluice_nixl
{

class memory_part
{
protected:
	using args = const nixl_opt_args_t *;
	using status = nixl_status_t;
	using lock = std::unique_lock<std::mutex>;

	static constexpr int64_t second = 1000000000;

	explicit memory_part(const std::string &name) : name_(name)
	{
		if (name.empty())
			throw std::invalid_argument("an agent needs a name");
	}
	memory_part(const memory_part &) = delete;
	memory_part &operator=(const memory_part &) = delete;
	~memory_part()
	{
		if (engine_)
			(void)sluice_close(engine_);
	}

public:
	status plugins(std::vector<nixl_backend_t> &out) const
	{
		out.clear();
		for (const auto &p : sluice_nixl::plugins())
			out.push_back(p.name);
		return NIXL_SUCCESS;
	}
	status plugin_params(const std::string &type, nixl_mem_list_t &mems,
			     nixl_b_params_t &params) const
	{
		const auto *p = plugin_of(type);
		if (!p)
			return NIXL_ERR_NOT_FOUND;
		mems = p->mems;
		params.clear();
		if (type == "POSIX")
			params["use_uring"] = "true";
		if (type == "UCX")
			params["device_list"] = params["ucx_devices"] = "";
		return NIXL_SUCCESS;
	}
	status backend_params(const nixlBackendH *backend, nixl_mem_list_t &mems,
			      nixl_b_params_t &params) const
	{
		if (!backend)
			return NIXL_ERR_INVALID_PARAM;
		mems = plugin_of(backend->type)->mems;
		params = backend->params;
		return NIXL_SUCCESS;
	}
	status create_backend(const std::string &type, const nixl_b_params_t &params,
			      nixlBackendH *&out)
	{
		lock held(mu_);
		if (!plugin_of(type))
			return no(NIXL_ERR_NOT_FOUND, "createBackend", "there is no " + type);
		for (const auto &b : backends_)
			if (b->type == type)
				return no(NIXL_ERR_INVALID_PARAM, "createBackend",
					  type + " was created before");
		if (engine_)
			return no(NIXL_ERR_NOT_ALLOWED, "createBackend",
				  "create it before memory is registered or an agent met");
		int code = type == "UCX" ? sluice_nixl::try_devices(name_, params) : SLUICE_OK;
		if (code < 0)
			return ended("createBackend", code);
		backends_.push_back(std::make_unique<nixlBackendH>(nixlBackendH{type, params}));
		out = backends_.back().get();
		return NIXL_SUCCESS;
	}

	status register_mem(const nixl_reg_dlist_t &descs, args extra)
	{
		lock held(mu_);
		std::set<uint64_t> cards;
		if (!serving(descs.getType(), extra, false))
			return no(NIXL_ERR_NOT_FOUND, "registerMem",
				  "no backend that was named or created serves " +
					  nixlEnumStrings::memTypeStr(descs.getType()));
		for (const auto &d : descs)
			if (descs.getType() == VRAM_SEG)
				cards.insert(d.devId);
		status s = open(cards);
		std::vector<range_ptr> done, again;
		for (size_t i = 0; s == NIXL_SUCCESS && i < static_cast<size_t>(descs.descCount());
		     i++) {
			if (range_ptr r = take_covered(descs.getType(), descs[i])) {
				again.push_back(r);
				continue;
			}
			done.push_back(std::make_shared<range>());
			s = enter(descs.getType(), descs[i], *done.back());
			if (s != NIXL_SUCCESS)
				done.pop_back();
		}
		for (const range_ptr &r : again)
			s == NIXL_SUCCESS ? ours_.put(r) : covered_.push_back(r);
		for (const range_ptr &r : done)
			if (s == NIXL_SUCCESS)
				ours_.put(r);
			else
				(void)sluice_region_close(r->handle);
		return s;
	}
	status deregister_mem(const nixl_reg_dlist_t &descs)
	{
		lock held(mu_);
		std::set<range_ptr> ending;
		for (const auto &d : descs) {
			range_ptr r = ours_.exact(descs.getType(), d, ending);
			if (!r && !ours_.exact(descs.getType(), d))
				return no(NIXL_ERR_NOT_FOUND, "deregisterMem",
					  "a descriptor is not registered as this range");
			if (r)
				ending.insert(r);
		}
		for (auto i = covered_.begin(); i != covered_.end();) {
			int code = ours_.cover(**i, ending) ? SLUICE_OK
							    : sluice_region_close((*i)->handle);
			if (code < 0)
				return ended("deregisterMem", code);
			i = ours_.cover(**i, ending) ? std::next(i) : covered_.erase(i);
		}
		for (const range_ptr &r : ending) {
			bool kept = ours_.cover(*r, ending);
			int code = kept ? SLUICE_OK : sluice_region_close(r->handle);
			if (code < 0)
				return ended("deregisterMem", code);
			if (kept)
				covered_.push_back(r);
			ours_.drop(r);
		}
		for (auto i = covered_.begin();
		     covered_.size() > covered_most && i != covered_.end();)
			i = sluice_region_close((*i)->handle) < 0 ? std::next(i)
								  : covered_.erase(i);
		return NIXL_SUCCESS;
	}
	status query_mem(const nixl_reg_dlist_t &descs, std::vector<nixl_query_resp_t> &out,
			 args extra) const
	{
		if (!extra || extra->backends.empty())
			return NIXL_ERR_INVALID_PARAM;
		if (!plugin_of(extra->backends[0]->type)->serves(FILE_SEG))
			return NIXL_ERR_NOT_SUPPORTED;
		for (const auto &d : descs) {
			struct stat s;
			if (stat(d.metaInfo.c_str(), &s) != 0)
				out.emplace_back(std::nullopt);
			else
				out.emplace_back(nixl_b_params_t{
					{"size", std::to_string(s.st_size)},
					{"mode", std::to_string(s.st_mode)},
					{"mtime", std::to_string(s.st_mtime)}});
		}
		return NIXL_SUCCESS;
	}

	status local_md(nixl_blob_t &out) const
	{
		lock held(mu_);
		return tell({name_, true, ours_.all(), ""}, out);
	}
	status local_partial_md(const nixl_reg_dlist_t &descs, nixl_blob_t &out) const
	{
		lock held(mu_);
		metadata m{name_, false, {}, ""};
		for (const auto &d : descs) {
			m.ranges.push_back(ours_.exact(descs.getType(), d));
			if (!m.ranges.back())
				return no(NIXL_ERR_NOT_FOUND, "getLocalPartialMD",
					  "a descriptor is not registered as this range");
		}
		return tell(std::move(m), out);
	}

protected:
	static status no(status s, const char *call, const std::string &why)
	{
		return refuse(s, call, why);
	}

	/* A range that had ended and is registered once more; null: there is none. */
	range_ptr take_covered(nixl_mem_t kind, const nixlBasicDesc &d)
	{
		for (auto i = covered_.begin(); kind != FILE_SEG && kind != BLK_SEG &&
						i != covered_.end(); ++i)
			if ((*i)->kind == kind && (*i)->device == d.devId &&
			    (*i)->address == d.addr && (*i)->length == d.len) {
				range_ptr r = *i;
				covered_.erase(i);
				return r;
			}
		return nullptr;
	}
	/* The engine has its backends, and its cards, from the beginning. */
	status open(const std::set<uint64_t> &cards) const
	{
		if (engine_)
			return NIXL_SUCCESS;
		sluice_engine e;
		status s = ended(
			"open", open_engine(name_, backends_, cards, &e));
		if (s != NIXL_SUCCESS)
			return s;
		struct sluice_segment one = {}; /* by which an agent without memory is described */
		one.size = sizeof one;
		one.kind = SLUICE_HOST, one.host = told_always_, one.length = 1;
		s = ended("open", sluice_register(e, "0", &one, &always_));
		if (s != NIXL_SUCCESS)
			(void)sluice_close(e);
		else
			engine_ = e;
		return s;
	}
	/* The first backend, of those named or of all, that serves such memory. */
	nixlBackendH *serving(nixl_mem_t kind, args extra, bool remote) const
	{
		auto fits = [&](const nixlBackendH *b) {
			const auto *p = plugin_of(b->type);
			return p->serves(kind) && (!remote || p->remote);
		};
		for (nixlBackendH *b : extra ? extra->backends : std::vector<nixlBackendH *>())
			if (fits(b))
				return b;
		for (const auto &b : backends_)
			if ((!extra || extra->backends.empty()) && fits(b.get()))
				return b.get();
		return nullptr;
	}
	status enter(nixl_mem_t kind, const nixlBlobDesc &d, range &r)
	{
		struct sluice_segment s = {};
		struct stat st;
		s.size = sizeof s, s.length = d.len;
		if (kind == DRAM_SEG) {
			s.kind = SLUICE_HOST, s.host = reinterpret_cast<void *>(d.addr);
		} else if (kind == VRAM_SEG) {
			s.kind = SLUICE_DEVICE, s.device_address = d.addr;
			s.device = static_cast<int32_t>(d.devId);
		} else {
			s.kind = SLUICE_FILE, s.file = static_cast<int32_t>(d.devId);
			s.offset = d.addr;
			int mode = fcntl(s.file, F_GETFL);
			bool plain = fstat(s.file, &st) == 0 && S_ISREG(st.st_mode);
			if (mode >= 0 && !(mode & O_DIRECT))
				s.flags = SLUICE_BUFFERED; /* it did not ask for more */
			if (mode >= 0 && (mode & O_ACCMODE) == O_RDONLY)
				s.flags |= SLUICE_READ_ONLY;
			else if (plain)
				s.flags |= SLUICE_EXTENDS; /* a write makes it longer */
			uint64_t all = s.flags & SLUICE_EXTENDS ? uint64_t{1} << 62
				       : plain ? static_cast<uint64_t>(st.st_size) : 0;
			if (!d.len && d.addr < all)
				s.length = all - d.addr;
		}
		r = {kind,      d.devId, d.addr, s.length, next_++,
		     0,         nullptr, d.len,  !(s.flags & SLUICE_READ_ONLY)};
		return ended(
			"registerMem", sluice_register(engine_, r.name().c_str(), &s, &r.handle));
	}
	status tell(metadata m, nixl_blob_t &out) const
	{
		if (!serving(DRAM_SEG, nullptr, true))
			return no(NIXL_ERR_INVALID_PARAM, "getLocalMD",
				  "no backend of this agent reaches others: create UCX, SHM, "
				  "TCP or RDMA");
		status s = open({});
		if (s != NIXL_SUCCESS)
			return s;
		std::vector<sluice_region> regions = {always_};
		for (const range_ptr &r : m.ranges)
			regions.push_back(r->handle);
		size_t n = 4096;
		int code = SLUICE_ERR_SPACE;
		while (code == SLUICE_ERR_SPACE) {
			m.description.resize(n);
			code = sluice_describe(engine_, regions.data(), regions.size(),
					       &m.description[0], n, &n);
		}
		if (code < 0)
			return ended("getLocalMD", code);
		m.description.resize(n);
		out = encode(m);
		return NIXL_SUCCESS;
	}

	const std::string name_;
	mutable char told_always_[1] = {0};

	mutable std::mutex mu_; /* guards what follows, and what the other parts keep */
	mutable sluice_engine engine_ = 0;
	mutable sluice_region always_ = 0;
	std::vector<std::unique_ptr<nixlBackendH>> backends_;
	places ours_;
	/* Those whose registration has ended, while others hold all their bytes: peers and
	   transfers that name them go on. The oldest first. */
	std::list<range_ptr> covered_;
	static constexpr size_t covered_most = 1024;
	uint64_t next_ = 1;
};

} // namespace sluice_nixl

#endif
