/* SPDX-License-Identifier: Apache-2.0 */
/* Tagged strings and buffers one behind the other, as programs for NIXL exchange lists. */
#ifndef SLUICE_NIXL_SERDES_H
#define SLUICE_NIXL_SERDES_H

#include <sys/types.h>

#include <cstring>

#include "../../nixl_types.h"

/* A reader takes entries in the order of the writer, and checks each length. */
class nixlSerDes
{
public:
	nixl_status_t addStr(const std::string &tag, const std::string &str)
	{
		return addBuf(tag, str.data(), static_cast<ssize_t>(str.size()));
	}
	nixl_status_t addBuf(const std::string &tag, const void *buf, ssize_t len)
	{
		if (len < 0)
			return NIXL_ERR_INVALID_PARAM;
		number(tag.size());
		bytes_ += tag;
		number(static_cast<uint64_t>(len));
		bytes_.append(static_cast<const char *>(buf), static_cast<size_t>(len));
		return NIXL_SUCCESS;
	}
	/* "" where another tag follows, or nothing. */
	std::string getStr(const std::string &tag)
	{
		size_t from, len;
		if (!next(tag, from, len))
			return "";
		at_ = from + len;
		return bytes_.substr(from, len);
	}
	/* The length of the next entry if it has this tag, else -1. */
	ssize_t getBufLen(const std::string &tag) const
	{
		size_t from, len;
		return next(tag, from, len) ? static_cast<ssize_t>(len) : -1;
	}
	nixl_status_t getBuf(const std::string &tag, void *buf, ssize_t len)
	{
		size_t from, have;
		if (!next(tag, from, have) || static_cast<ssize_t>(have) != len)
			return NIXL_ERR_MISMATCH;
		std::memcpy(buf, bytes_.data() + from, have);
		at_ = from + have;
		return NIXL_SUCCESS;
	}
	std::string exportStr() const { return magic() + bytes_; }
	nixl_status_t importStr(const std::string &from)
	{
		if (from.compare(0, magic().size(), magic()) != 0)
			return NIXL_ERR_MISMATCH;
		bytes_ = from.substr(magic().size());
		at_ = 0;
		return NIXL_SUCCESS;
	}

private:
	static std::string magic() { return "sluice-serdes1|"; }
	void number(uint64_t n) { bytes_.append(reinterpret_cast<const char *>(&n), sizeof n); }
	bool take(size_t &at, uint64_t &n) const
	{
		if (bytes_.size() - at < sizeof n)
			return false;
		std::memcpy(&n, bytes_.data() + at, sizeof n);
		at += sizeof n;
		return n <= bytes_.size() - at;
	}
	bool next(const std::string &tag, size_t &from, size_t &len) const
	{
		size_t at = at_;
		uint64_t n;
		if (!take(at, n) || bytes_.compare(at, n, tag) != 0)
			return false;
		at += n;
		if (!take(at, n))
			return false;
		from = at, len = n;
		return true;
	}

	std::string bytes_;
	size_t at_ = 0;
};

#endif
