/* SPDX-License-Identifier: Apache-2.0 */
/* Registered ranges, what an agent tells of them, and lists of descriptors as transfers. */
#ifndef SLUICE_NIXL_RANGES_H
#define SLUICE_NIXL_RANGES_H

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "nixl_descriptors.h"
#include "sluice.h"

namespace sluice_nixl
{

/* Says on stderr why a call fails, as NIXL logs errors, unless NIXL_LOG_LEVEL is FATAL. */
inline nixl_status_t refuse(nixl_status_t status, const char *call, const std::string &why)
{
	const char *level = std::getenv("NIXL_LOG_LEVEL");
	if (!level || std::string(level) != "FATAL")
		std::fprintf(stderr, "sluice: %s: %s\n", call, why.c_str());
	return status;
}

inline nixl_status_t status_of(int code)
{
	switch (code) {
	case SLUICE_OK: return NIXL_SUCCESS;
	case SLUICE_PENDING: return NIXL_IN_PROG;
	case SLUICE_ERR_PEER_LOST: return NIXL_ERR_REMOTE_DISCONNECT;
	case SLUICE_ERR_ABORTED: return NIXL_ERR_CANCELED;
	case SLUICE_ERR_BUSY:
	case SLUICE_ERR_READ_ONLY: return NIXL_ERR_NOT_ALLOWED;
	case SLUICE_ERR_REVOKED:
	case SLUICE_ERR_TOKEN:
	case SLUICE_ERR_NO_ROUTE: return NIXL_ERR_NOT_FOUND;
	case SLUICE_ERR_NOT_SUPPORTED:
	case SLUICE_ERR_UNAVAILABLE: return NIXL_ERR_NOT_SUPPORTED;
	case SLUICE_ERR_VERSION:
	case SLUICE_ERR_CORRUPT: return NIXL_ERR_MISMATCH;
	case SLUICE_ERR_BOUNDS:
	case SLUICE_ERR_ARGUMENT:
	case SLUICE_ERR_HANDLE:
	case SLUICE_ERR_CLOSED: return NIXL_ERR_INVALID_PARAM;
	default: return NIXL_ERR_BACKEND;
	}
}

inline nixl_status_t ended(const char *call, int code)
{
	return code < 0 ? refuse(status_of(code), call, sluice_error()) : status_of(code);
}

/* A registered range: handle is a region of ours, or a remote of a peer's. */
struct range {
	nixl_mem_t kind;
	uint64_t device, address, length, number, handle;
	std::shared_ptr<const std::string> told; /* the description that it came with */
	uint64_t listed = 0; /* ours: its length as a list says it, 0 of a file stands for all */
	bool writable = true;

	std::string name() const { return std::to_string(number); }
	bool holds(uint64_t at, uint64_t n) const
	{
		return address <= at && at - address <= length && n <= length - (at - address);
	}
};
using range_ptr = std::shared_ptr<range>;

/* A descriptor by its range, and where it begins there. */
struct piece {
	range_ptr in;
	uint64_t offset, length;
};
using pieces = std::vector<piece>;

/* The ranges of one agent. */
class places
{
public:
	void put(const range_ptr &r) { all_.emplace(key(r->kind, r->device, r->address), r); }
	void drop(const range_ptr &r)
	{
		for (auto i = all_.begin(); i != all_.end(); ++i)
			if (i->second == r) {
				all_.erase(i);
				return;
			}
	}
	/* Updates a range by its owner's metadata. Prepared lists refer to that same range. */
	void learn(const range_ptr &r)
	{
		auto same = all_.equal_range(key(r->kind, r->device, r->address));
		for (auto i = same.first; i != same.second; ++i)
			if (i->second->number == r->number && i->second->length == r->length) {
				*i->second = *r;
				return;
			}
		put(r);
	}
	/* Drops those that a list of all has no more. */
	void keep_only(const std::vector<range_ptr> &list)
	{
		std::set<uint64_t> numbers;
		for (const range_ptr &r : list)
			numbers.insert(r->number);
		for (auto i = all_.begin(); i != all_.end();)
			i = numbers.count(i->second->number) ? std::next(i) : all_.erase(i);
	}
	/* The latest that is registered as this range, neither more nor less, and was not found
	   before; null: none. */
	range_ptr exact(nixl_mem_t kind, const nixlBasicDesc &d,
			const std::set<range_ptr> &before = {}) const
	{
		auto found = all_.equal_range(key(kind, d.devId, d.addr));
		for (auto i = found.second; i != found.first;)
			if ((--i)->second->listed == d.len && !before.count(i->second))
				return i->second;
		return nullptr;
	}
	/* Whether ranges that do not end hold all bytes of one together, and may be written where
	   it may. */
	bool cover(const range &r, const std::set<range_ptr> &ending) const
	{
		uint64_t at = r.address, end = r.address + r.length;
		for (auto i = all_.lower_bound(key(r.kind, r.device, 0)); i != all_.end(); ++i) {
			const range &by = *i->second;
			if (at >= end || by.kind != r.kind || by.device != r.device ||
			    by.address > at)
				break;
			if (by.writable >= r.writable && !ending.count(i->second))
				at = std::max(at, by.address + by.length);
		}
		return at >= end;
	}
	/* One that holds all of it; null: none. */
	range_ptr around(nixl_mem_t kind, const nixlBasicDesc &d) const
	{
		auto from = all_.lower_bound(key(kind, d.devId, 0));
		for (auto i = all_.upper_bound(key(kind, d.devId, d.addr)); i != from;)
			if ((--i)->second->holds(d.addr, d.len))
				return i->second;
		return nullptr;
	}
	std::vector<range_ptr> all() const
	{
		std::vector<range_ptr> out;
		for (const auto &entry : all_)
			out.push_back(entry.second);
		return out;
	}
	/* Finds each descriptor of a list. False: why says which one lies nowhere. */
	template <class List> bool locate(const List &list, pieces &out, std::string &why) const
	{
		for (const auto &d : list) {
			range_ptr in = out.empty() || !near(*out.back().in, list.getType(), d)
					       ? around(list.getType(), d)
					       : out.back().in;
			if (!in) {
				why = nixlEnumStrings::memTypeStr(list.getType()) + ": " +
				      std::to_string(d.len) + " bytes at " +
				      std::to_string(d.addr) +
				      " lie in no registered range, or go past its end";
				return false;
			}
			out.push_back({in, d.addr - in->address, d.len});
		}
		return true;
	}

private:
	using Key = std::tuple<nixl_mem_t, uint64_t, uint64_t>;
	static Key key(nixl_mem_t kind, uint64_t device, uint64_t at) { return {kind, device, at}; }
	static bool near(const range &r, nixl_mem_t kind, const nixlBasicDesc &d)
	{
		return r.kind == kind && r.device == d.devId && r.holds(d.addr, d.len);
	}
	std::multimap<Key, range_ptr> all_;
};

/* Blocks of one length at multiples of a stride from a base. */
struct pattern {
	uint64_t base = 0, stride = 0;
	std::vector<uint32_t> index;
};

constexpr size_t pattern_least = 8; /* below it a pattern saves nothing */

inline bool find_pattern(const piece *p, size_t n, pattern &out)
{
	uint64_t base = p[0].offset, last = p[0].offset, stride = 0;
	for (size_t i = 0; i < n; i++) {
		if (p[i].length != p[0].length)
			return false;
		base = std::min(base, p[i].offset), last = std::max(last, p[i].offset);
	}
	for (size_t i = 0; i < n; i++)
		stride = std::gcd(stride, p[i].offset - base);
	if (stride < p[0].length || stride == 0 || (last - base) / stride > UINT32_MAX)
		return false; /* not blocks that lie beside each other */
	out.base = base, out.stride = stride;
	out.index.resize(n);
	for (size_t i = 0; i < n; i++)
		out.index[i] = static_cast<uint32_t>((p[i].offset - base) / stride);
	return true;
}

/*
 * Lists pairs of pieces in a transfer: those that follow each other in the same pair of ranges go
 * together, as a pattern where they are one, whose lists are put into kept.
 */
inline int fill(sluice_transfer t, const pieces &local, const pieces &remote,
		std::vector<pattern> &kept)
{
	for (size_t i = 0, end; i < local.size(); i = end) {
		for (end = i + 1; end < local.size() && local[end].in == local[i].in &&
				  remote[end].in == remote[i].in;)
			end++;
		size_t n = end - i;
		pattern here, there;
		int code;
		if (n >= pattern_least && find_pattern(&local[i], n, here) &&
		    find_pattern(&remote[i], n, there)) {
			struct sluice_pages p = {};
			p.size = sizeof p;
			p.count = n, p.entry_length = local[i].length;
			p.local_base = here.base, p.local_stride = here.stride;
			p.remote_base = there.base, p.remote_stride = there.stride;
			p.local = here.index.data(), p.remote = there.index.data();
			kept.push_back(std::move(here));
			kept.push_back(std::move(there));
			code = sluice_transfer_add_pages(t, local[i].in->handle,
							 remote[i].in->handle, &p);
		} else {
			std::vector<sluice_desc> list(n);
			for (size_t k = 0; k < n; k++)
				list[k] = {local[i + k].offset, remote[i + k].offset,
					   local[i + k].length};
			code = sluice_transfer_add(t, local[i].in->handle, remote[i].in->handle,
						   list.data(), n);
		}
		if (code < 0)
			return code;
	}
	return SLUICE_OK;
}

/* The metadata that one agent sends another. Whole metadata replaces all before it. */
struct metadata {
	std::string agent;
	bool whole = false;
	std::vector<range_ptr> ranges;
	std::string description;
};

inline uint32_t checksum(const char *p, size_t n)
{
	uint32_t crc = ~uint32_t{0};
	for (size_t i = 0; i < n; i++) {
		crc ^= static_cast<unsigned char>(p[i]);
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
	}
	return ~crc;
}

inline nixl_blob_t encode(const metadata &m)
{
	nixlSerDes s;
	uint64_t head[2] = {m.whole, m.ranges.size()};
	(void)s.addStr("agent", m.agent);
	(void)s.addBuf("head", head, sizeof head);
	for (const range_ptr &r : m.ranges) {
		uint64_t v[5] = {static_cast<uint64_t>(r->kind), r->device, r->address, r->length,
				 r->number};
		(void)s.addBuf("r", v, sizeof v);
	}
	(void)s.addStr("description", m.description);
	std::string body = s.exportStr();
	uint32_t sum = checksum(body.data(), body.size());
	return body.append(reinterpret_cast<const char *>(&sum), sizeof sum);
}

/* False for metadata that is cut or altered, and for other bytes. */
inline bool decode(const nixl_blob_t &blob, metadata &m)
{
	nixlSerDes s;
	uint32_t sum;
	uint64_t head[2], v[5];
	if (blob.size() < sizeof sum)
		return false;
	size_t n = blob.size() - sizeof sum;
	std::memcpy(&sum, blob.data() + n, sizeof sum);
	if (sum != checksum(blob.data(), n) || s.importStr(blob.substr(0, n)) != NIXL_SUCCESS)
		return false;
	m.agent = s.getStr("agent");
	if (s.getBuf("head", head, sizeof head) != NIXL_SUCCESS)
		return false;
	m.whole = head[0] != 0;
	for (uint64_t i = 0; i < head[1]; i++) {
		if (s.getBuf("r", v, sizeof v) != NIXL_SUCCESS || v[0] > FILE_SEG)
			return false;
		m.ranges.push_back(std::make_shared<range>(
			range{static_cast<nixl_mem_t>(v[0]), v[1], v[2], v[3], v[4], 0, nullptr}));
	}
	m.description = s.getStr("description");
	return !m.description.empty();
}

} // namespace sluice_nixl

#endif
