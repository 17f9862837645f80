/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of an agent: see nixl.h. */
#ifndef SLUICE_NIXL_PARAMS_H
#define SLUICE_NIXL_PARAMS_H

#include "nixl_types.h"

/*
 * Threads of progress, delays and the mode of synchronization have no effect: nothing needs to be
 * polled. captureTelemetry keeps the times of transfers, as NIXL_TELEMETRY_ENABLE does.
 */
struct nixlAgentConfig {
	bool useProgThread = false;
	bool useListenThread = false;
	uint16_t listenPort = default_comm_port;
	nixl_thread_sync_t syncMode = nixl_thread_sync_t::NIXL_THREAD_SYNC_DEFAULT;
	bool captureTelemetry = false;
	uint64_t pthrDelay = 0;
	uint64_t lthrDelay = 100000;
	std::chrono::microseconds etcdWatchTimeout{5000000};

	nixlAgentConfig() = default;
	explicit nixlAgentConfig(
		bool use_prog_thread, bool use_listen_thread = false,
		uint16_t port = default_comm_port,
		nixl_thread_sync_t sync_mode = nixl_thread_sync_t::NIXL_THREAD_SYNC_DEFAULT,
		unsigned num_workers = 1, uint64_t pthr_delay_us = 0,
		uint64_t lthr_delay_us = 100000, bool capture_telemetry = false,
		std::chrono::microseconds etcd_watch_timeout = std::chrono::microseconds(5000000))
		: useProgThread(use_prog_thread), useListenThread(use_listen_thread),
		  listenPort(port), syncMode(sync_mode), captureTelemetry(capture_telemetry),
		  pthrDelay(pthr_delay_us), lthrDelay(lthr_delay_us),
		  etcdWatchTimeout(etcd_watch_timeout)
	{
		(void)num_workers;
	}
};

#endif
