/* SPDX-License-Identifier: Apache-2.0 */
/* The part of an agent that exchanges metadata by ports. Programs include nixl.h. */
#ifndef SLUICE_NIXL_PORTS_H
#define SLUICE_NIXL_PORTS_H

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <thread>

#include "sluice_meeting.h"

namespace sluice_nixl
{

/* One connection. Any thread may interrupt it; only one uses it. */
class stream
{
public:
	explicit stream(int fd = -1) : fd_(fd) {}
	stream(const stream &) = delete;
	stream &operator=(const stream &) = delete;
	~stream()
	{
		if (fd_ >= 0)
			(void)close(fd_);
	}

	/* False: why says what failed. A kernel that gets no answer gives up after the limit. */
	bool open(const std::string &host, int port, std::string &why)
	{
		struct addrinfo hints = {}, *found = nullptr;
		hints.ai_socktype = SOCK_STREAM;
		int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
		if (code != 0)
			why = gai_strerror(code);
		for (struct addrinfo *a = code == 0 ? found : nullptr; a; a = a->ai_next) {
			int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
			replace(fd);
			if (fd >= 0 && limit() && connect(fd, a->ai_addr, a->ai_addrlen) == 0) {
				freeaddrinfo(found);
				return true;
			}
			why = std::strerror(errno);
		}
		if (code == 0)
			freeaddrinfo(found);
		return false;
	}
	/* Each wait for the other side ends after five seconds. */
	bool limit()
	{
		struct timeval t = {5, 0};
		return !setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t) &&
		       !setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
	}
	/* Ends what it is used for, now and later. */
	void interrupt()
	{
		std::lock_guard<std::mutex> held(mu_);
		interrupted_ = true;
		(void)shutdown(fd_, SHUT_RDWR);
	}

	/* A frame is "SLNX", a word of one letter, the length of the data, and the data. */
	bool send(char word, const std::string &data)
	{
		uint32_t n = static_cast<uint32_t>(data.size());
		std::string frame("SLNX");
		frame += word;
		for (int shift = 0; shift < 32; shift += 8)
			frame += static_cast<char>(n >> shift & 0xff);
		frame += data;
		for (size_t at = 0; at < frame.size();) {
			ssize_t k = ::send(fd_, &frame[at], frame.size() - at, MSG_NOSIGNAL);
			if (k <= 0)
				return false;
			at += static_cast<size_t>(k);
		}
		return true;
	}
	/* 0 where no frame came, or one that no agent sends. The whole has 20 seconds. */
	char receive(std::string &data)
	{
		auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
		std::string head;
		if (!exactly(9, head, end) || head.compare(0, 4, "SLNX") != 0)
			return 0;
		uint32_t n = 0;
		for (size_t i = 0; i < 4; i++)
			n |= uint32_t{static_cast<unsigned char>(head[5 + i])} << 8 * i;
		return n <= most && exactly(n, data, end) ? head[4] : '\0';
	}

private:
	static constexpr uint32_t most = 256 << 20;

	void replace(int fd)
	{
		std::lock_guard<std::mutex> held(mu_);
		if (fd_ >= 0)
			(void)close(fd_);
		fd_ = fd;
		if (interrupted_)
			(void)shutdown(fd_, SHUT_RDWR);
	}
	bool exactly(size_t n, std::string &out, std::chrono::steady_clock::time_point end)
	{
		out.clear();
		while (out.size() < n && std::chrono::steady_clock::now() < end) {
			char part[16 << 10];
			ssize_t k = recv(fd_, part, std::min(sizeof part, n - out.size()), 0);
			if (k <= 0)
				return false;
			out.append(part, static_cast<size_t>(k));
		}
		return out.size() == n;
	}

	int fd_;
	std::mutex mu_; /* guards fd_ against other threads, and interrupted_ */
	bool interrupted_ = false;
};

/*
 * Nothing here identifies the other end, as with NIXL: a program that reaches the port gets the
 * metadata, with which this agent's memory can be reached.
 */
class ports_part : public meeting_part
{
public:
	status send_md(args extra)
	{
		nixl_blob_t blob;
		status s = local_md(blob);
		return s == NIXL_SUCCESS ? call("sendLocalMD", extra, {'P', blob, ""}) : s;
	}
	status send_partial_md(const nixl_reg_dlist_t &descs, args extra)
	{
		nixl_blob_t blob;
		status s = local_partial_md(descs, blob);
		return s == NIXL_SUCCESS ? call("sendLocalPartialMD", extra, {'P', blob, ""})
					 : s;
	}
	status fetch_md(const std::string &agent, args extra)
	{
		return call("fetchRemoteMD", extra, {'G', name_, agent});
	}
	status invalidate_md(args extra)
	{
		return call("invalidateLocalMD", extra, {'F', name_, ""});
	}

protected:
	ports_part(const std::string &name, const nixlAgentConfig &config) : meeting_part(name)
	{
		if (!config.useListenThread)
			return;
		struct sockaddr_in any = {};
		any.sin_family = AF_INET;
		any.sin_port = htons(config.listenPort);
		int yes = 1;
		listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		(void)setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
		if (bind(listener_, reinterpret_cast<sockaddr *>(&any), sizeof any) != 0 ||
		    listen(listener_, 64) != 0) {
			std::string why = std::strerror(errno);
			(void)::close(listener_);
			throw std::runtime_error("listen on port " +
						 std::to_string(config.listenPort) + ": " + why);
		}
		listening_ = std::thread([this] { serve(); });
	}
	~ports_part()
	{
		if (getpid() != process_) { /* the child of a fork has none of the threads */
			for (std::thread *t : {&listening_, &calling_})
				if (t->joinable())
					t->detach();
			return;
		}
		{
			lock held(calls_mu_);
			ending_ = true;
			calls_cv_.notify_all(); /* what waits is still sent, for ten seconds */
			calls_cv_.wait_for(held, std::chrono::seconds(10),
					   [this] { return jobs_.empty() && !caller_; });
			jobs_.clear();
			if (caller_)
				caller_->interrupt();
			if (answered_)
				answered_->interrupt();
		}
		if (listening_.joinable()) {
			(void)shutdown(listener_, SHUT_RDWR); /* wakes accept */
			listening_.join();
			(void)::close(listener_);
		}
		if (calling_.joinable())
			calling_.join();
	}

private:
	struct job {
		char word; /* P: here is metadata; G: send yours; F: forget me */
		std::string data;
		std::string agent; /* that is to answer */
		std::string host{};
		int port = 0;
	};
	static constexpr size_t queued = 1024;

	/* Returns at once, as NIXL does. The side that waits asks checkRemoteMD. */
	status call(const char *name, args extra, job j)
	{
		if (!extra || extra->ipAddr.empty())
			return no(NIXL_ERR_INVALID_PARAM, name,
				  "say ipAddr: there is no central store of metadata here");
		j.host = extra->ipAddr, j.port = extra->port;
		lock held(calls_mu_);
		if (jobs_.size() >= queued)
			return no(NIXL_ERR_BACKEND, name, "1024 exchanges of metadata wait");
		if (!calling_.joinable())
			calling_ = std::thread([this] { work(); });
		jobs_.push_back(std::move(j));
		calls_cv_.notify_all();
		return NIXL_SUCCESS;
	}
	void work()
	{
		lock held(calls_mu_);
		for (;;) {
			calls_cv_.wait(held, [this] { return ending_ || !jobs_.empty(); });
			if (jobs_.empty())
				return;
			stream s;
			job j = std::move(jobs_.front());
			jobs_.pop_front();
			caller_ = &s;
			held.unlock();
			exchange(s, j);
			held.lock();
			caller_ = nullptr;
			calls_cv_.notify_all();
		}
	}
	void exchange(stream &s, const job &j)
	{
		std::string why = "the other side has hung up", data;
		metadata m;
		bool ok = s.open(j.host, j.port, why) && s.send(j.word, j.data);
		if (ok && j.word == 'G') {
			ok = s.receive(data) == 'P' && decode(data, m) && m.agent == j.agent;
			why = m.agent.empty() ? "no metadata came" : m.agent + " listens there";
			std::string agent;
			if (ok && load_md(data, agent) != NIXL_SUCCESS)
				return; /* it has said why */
		}
		if (!ok)
			(void)no(NIXL_ERR_BACKEND, "exchange of metadata",
				 j.host + " port " + std::to_string(j.port) + ": " + why);
	}
	void serve()
	{
		for (;;) {
			int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
			stream s(fd);
			lock held(calls_mu_);
			if (ending_)
				return;
			answered_ = &s;
			held.unlock();
			if (fd < 0) /* out of descriptors, say */
				std::this_thread::sleep_for(std::chrono::milliseconds(100));
			else if (s.limit())
				answer(s);
			held.lock();
			answered_ = nullptr;
		}
	}
	void answer(stream &s)
	{
		std::string data, agent;
		switch (s.receive(data)) {
		case 'G':
			if (local_md(data) == NIXL_SUCCESS)
				(void)s.send('P', data);
			break;
		case 'P': (void)load_md(data, agent); break;
		case 'F': (void)forget(data); break;
		}
	}

	const pid_t process_ = getpid();
	int listener_ = -1;
	std::mutex calls_mu_; /* guards what follows */
	std::condition_variable calls_cv_;
	std::deque<job> jobs_;
	stream *caller_ = nullptr, *answered_ = nullptr;
	bool ending_ = false;
	std::thread listening_, calling_;
};

} // namespace sluice_nixl

#endif
