/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of memory and lists of them: see nixl.h. */
#ifndef SLUICE_NIXL_DESCRIPTORS_H
#define SLUICE_NIXL_DESCRIPTORS_H

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "nixl_types.h"
#include "utils/serdes/serdes.h"

/* One range: of an address, or of a file that devId is the descriptor of, from offset addr on. */
class nixlBasicDesc
{
public:
	uintptr_t addr = 0;
	size_t len = 0;
	uint64_t devId = 0;

	nixlBasicDesc() = default;
	nixlBasicDesc(uintptr_t a, size_t n, uint64_t dev) : addr(a), len(n), devId(dev) {}

	bool operator<(const nixlBasicDesc &o) const
	{
		return std::tie(devId, addr, len) < std::tie(o.devId, o.addr, o.len);
	}
	friend bool operator==(const nixlBasicDesc &a, const nixlBasicDesc &b)
	{
		return a.addr == b.addr && a.len == b.len && a.devId == b.devId;
	}
	friend bool operator!=(const nixlBasicDesc &a, const nixlBasicDesc &b) { return !(a == b); }
	bool covers(const nixlBasicDesc &q) const
	{
		return devId == q.devId && addr <= q.addr && q.addr - addr <= len &&
		       q.len <= len - (q.addr - addr);
	}
	bool overlaps(const nixlBasicDesc &q) const
	{
		return devId == q.devId &&
		       (addr <= q.addr ? q.addr - addr < len : addr - q.addr < q.len);
	}
	void print(const std::string &suffix) const
	{
		std::printf("%#zx, %zu bytes, device %llu%s\n", static_cast<size_t>(addr), len,
			    static_cast<unsigned long long>(devId), suffix.c_str());
	}
};

/* A run of blocks of one length, each stride bytes behind the one before. */
struct nixlStrideDesc : nixlBasicDesc {
	size_t stride = 0;
	size_t count = 0;

	using nixlBasicDesc::nixlBasicDesc;
	nixlStrideDesc() = default;
	nixlStrideDesc(uintptr_t a, size_t n, uint64_t dev, size_t every, size_t blocks)
		: nixlBasicDesc(a, n, dev), stride(every), count(blocks)
	{
	}
	friend bool operator==(const nixlStrideDesc &a, const nixlStrideDesc &b)
	{
		return static_cast<const nixlBasicDesc &>(a) == b && a.stride == b.stride &&
		       a.count == b.count;
	}
};

class nixlBlobDesc : public nixlBasicDesc
{
public:
	nixl_blob_t metaInfo;

	using nixlBasicDesc::nixlBasicDesc;
	nixlBlobDesc() = default;
	nixlBlobDesc(uintptr_t a, size_t n, uint64_t dev, const nixl_blob_t &meta)
		: nixlBasicDesc(a, n, dev), metaInfo(meta)
	{
	}
	nixlBlobDesc(const nixlBasicDesc &d, const nixl_blob_t &meta)
		: nixlBasicDesc(d), metaInfo(meta)
	{
	}
	friend bool operator==(const nixlBlobDesc &a, const nixlBlobDesc &b)
	{
		return static_cast<const nixlBasicDesc &>(a) == b && a.metaInfo == b.metaInfo;
	}
};

struct nixlRemoteDesc : nixlBasicDesc {
	std::string remoteAgent;

	using nixlBasicDesc::nixlBasicDesc;
	nixlRemoteDesc() = default;
	nixlRemoteDesc(uintptr_t a, size_t n, uint64_t dev, const std::string &agent)
		: nixlBasicDesc(a, n, dev), remoteAgent(agent)
	{
	}
	nixlRemoteDesc(const nixlBasicDesc &d, const std::string &agent)
		: nixlBasicDesc(d), remoteAgent(agent)
	{
	}
	friend bool operator==(const nixlRemoteDesc &a, const nixlRemoteDesc &b)
	{
		return static_cast<const nixlBasicDesc &>(a) == b && a.remoteAgent == b.remoteAgent;
	}
};

/* Descriptors of one type of memory. */
template <class T> class nixlDescList
{
public:
	nixlDescList(nixl_mem_t mem, int size = 0)
		: type(mem), descs(static_cast<size_t>(size))
	{
	}
	/* Reads a list that serialize wrote; an empty list if no such list follows. */
	explicit nixlDescList(nixlSerDes *from);
	nixlDescList(const nixlDescList &) = default;
	nixlDescList &operator=(const nixlDescList &) = default;
	virtual ~nixlDescList() = default;

	nixl_mem_t getType() const { return type; }
	int descCount() const { return static_cast<int>(descs.size()); }
	bool isEmpty() const { return descs.empty(); }
	const T &operator[](size_t i) const { return descs[i]; }
	T &operator[](size_t i) { return descs[i]; }
	auto begin() const { return descs.begin(); }
	auto end() const { return descs.end(); }
	auto begin() { return descs.begin(); }
	auto end() { return descs.end(); }
	void resize(size_t n) { descs.resize(n); }
	void reserve(size_t n) { descs.reserve(n); }
	void clear() { descs.clear(); }
	void addDesc(const T &desc) { descs.push_back(desc); }
	template <class... Args> T &emplace(Args &&...args)
	{
		return descs.emplace_back(std::forward<Args>(args)...);
	}
	void remDesc(int i)
	{
		if (i < 0 || i >= descCount())
			throw std::out_of_range("remDesc: no descriptor has this index");
		descs.erase(descs.begin() + i);
	}
	nixlDescList<nixlBasicDesc> trim() const
	{
		nixlDescList<nixlBasicDesc> out(type);
		out.reserve(descs.size());
		for (const T &d : descs)
			out.addDesc(d);
		return out;
	}
	/* NIXL_ERR_NOT_FOUND where no descriptor is this range. */
	int getIndex(const nixlBasicDesc &query) const
	{
		auto at = std::find_if(descs.begin(), descs.end(), [&](const T &d) {
			return static_cast<const nixlBasicDesc &>(d) == query;
		});
		return at == descs.end() ? static_cast<int>(NIXL_ERR_NOT_FOUND)
					 : static_cast<int>(at - descs.begin());
	}
	nixl_status_t serialize(nixlSerDes *to) const;
	void print() const
	{
		for (const T &d : descs)
			d.print("");
	}
	friend bool operator==(const nixlDescList &a, const nixlDescList &b)
	{
		return a.type == b.type && a.descs == b.descs;
	}

protected:
	nixl_mem_t type;
	std::vector<T> descs;
};

using nixl_xfer_dlist_t = nixlDescList<nixlBasicDesc>;
using nixl_stride_dlist_t = nixlDescList<nixlStrideDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;
using nixl_remote_dlist_t = nixlDescList<nixlRemoteDesc>;
using nixl_local_dlist_t = nixlDescList<nixlBasicDesc>;

namespace sluice_nixl
{

/* The text, or the numbers, that a descriptor has beyond its range. */
template <class T> std::string extra_of(const T &d)
{
	if constexpr (std::is_same_v<T, nixlBlobDesc>)
		return d.metaInfo;
	else if constexpr (std::is_same_v<T, nixlRemoteDesc>)
		return d.remoteAgent;
	else if constexpr (std::is_same_v<T, nixlStrideDesc>)
		return std::to_string(d.stride) + " " + std::to_string(d.count);
	else
		return "";
}

template <class T> void put_extra(T &d, const std::string &text)
{
	if constexpr (std::is_same_v<T, nixlBlobDesc>)
		d.metaInfo = text;
	else if constexpr (std::is_same_v<T, nixlRemoteDesc>)
		d.remoteAgent = text;
	else if constexpr (std::is_same_v<T, nixlStrideDesc>)
		(void)std::sscanf(text.c_str(), "%zu %zu", &d.stride, &d.count);
}

} // namespace sluice_nixl

template <class T> nixl_status_t nixlDescList<T>::serialize(nixlSerDes *to) const
{
	uint64_t head[2] = {static_cast<uint64_t>(type), descs.size()};
	nixl_status_t s = to->addBuf("list", head, sizeof head);
	for (const T &d : descs) {
		uint64_t range[3] = {d.addr, d.len, d.devId};
		if (s == NIXL_SUCCESS)
			s = to->addBuf("range", range, sizeof range);
		if (s == NIXL_SUCCESS && !std::is_same_v<T, nixlBasicDesc>)
			s = to->addStr("extra", sluice_nixl::extra_of(d));
	}
	return s;
}

template <class T> nixlDescList<T>::nixlDescList(nixlSerDes *from) : type(DRAM_SEG)
{
	uint64_t head[2], range[3];
	if (from->getBuf("list", head, sizeof head) != NIXL_SUCCESS || head[0] > FILE_SEG)
		return;
	for (uint64_t i = 0; i < head[1]; i++) {
		if (from->getBuf("range", range, sizeof range) != NIXL_SUCCESS) {
			descs.clear();
			return;
		}
		T d(range[0], range[1], range[2]);
		if (!std::is_same_v<T, nixlBasicDesc>)
			sluice_nixl::put_extra(d, from->getStr("extra"));
		descs.push_back(d);
	}
	type = static_cast<nixl_mem_t>(head[0]);
}

#endif
