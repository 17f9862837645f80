/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NIXL's agent for C++17 over sluice: a program that includes nixl.h compiles with the folder of
 * this file before NIXL's, and is linked with `pkg-config --cflags --libs sluice` alone. There is
 * nothing else to build. docs/nixl.md of the project says how the calls differ from NIXL's;
 * prepMemView answers NIXL_ERR_NOT_SUPPORTED.
 *
 * Both sides must be C++ programs over this header: the metadata of the Python face differs.
 * Why a call failed is said on stderr, unless NIXL_LOG_LEVEL=FATAL.
 */
#ifndef SLUICE_NIXL_H
#define SLUICE_NIXL_H

#if __cplusplus >= 202002L
#include <span>
#endif

#include "nixl_descriptors.h"
#include "nixl_params.h"
#include "nixl_types.h"
#include "sluice_agent.h"

/* Its calls may come from any thread. When it ends, its lists, requests and backends do. */
class nixlAgent
{
	using args = const nixl_opt_args_t *;
	using status = nixl_status_t;
	using text = const std::string &;

public:
	static constexpr nixl_api_version getApiVersion() { return nixlApiVersionV1; }

	/* An empty name is std::invalid_argument, a port in use std::runtime_error. */
	nixlAgent(text name, const nixlAgentConfig &cfg)
		: data(std::make_unique<nixlAgentData>(name, cfg))
	{
	}
	nixlAgent(nixlAgent &&) = delete;
	nixlAgent &operator=(nixlAgent &&) = delete;

	/* Backends. An agent has all of them before it registers memory or meets another. */
	status getAvailPlugins(std::vector<nixl_backend_t> &plugins)
	{
		return data->plugins(plugins);
	}
	status getPluginParams(const nixl_backend_t &type, nixl_mem_list_t &mems,
			       nixl_b_params_t &params) const
	{
		return data->plugin_params(type, mems, params);
	}
	status getBackendParams(const nixlBackendH *backend, nixl_mem_list_t &mems,
				nixl_b_params_t &params) const
	{
		return data->backend_params(backend, mems, params);
	}
	status createBackend(const nixl_backend_t &type, const nixl_b_params_t &params,
			     nixlBackendH *&backend)
	{
		return data->create_backend(type, params, backend);
	}

	/* Memory. deregisterMem: no peer reaches it any more when it returns NIXL_SUCCESS. */
	status registerMem(const nixl_reg_dlist_t &descs, args extra = nullptr)
	{
		return data->register_mem(descs, extra);
	}
	status deregisterMem(const nixl_reg_dlist_t &descs, args = nullptr)
	{
		return data->deregister_mem(descs);
	}
	status queryMem(const nixl_reg_dlist_t &descs, std::vector<nixl_query_resp_t> &resp,
			args extra) const
	{
		return data->query_mem(descs, resp, extra);
	}

	/*
	 * Other agents. A lost one that lives is connected anew by the next use of its name, which
	 * may wait a second for it; while it cannot be, uses are NIXL_ERR_REMOTE_DISCONNECT.
	 */
	status getLocalMD(nixl_blob_t &str) const { return data->local_md(str); }
	status getLocalPartialMD(const nixl_reg_dlist_t &descs, nixl_blob_t &str,
				 args = nullptr) const
	{
		return data->local_partial_md(descs, str);
	}
	status loadRemoteMD(const nixl_blob_t &remote_metadata, std::string &agent_name)
	{
		return data->load_md(remote_metadata, agent_name);
	}
	status invalidateRemoteMD(text remote_agent) { return data->forget(remote_agent); }
	status checkRemoteMD(const std::string remote_name, const nixl_xfer_dlist_t &descs) const
	{
		return data->check_md(remote_name, descs);
	}
	status makeConnection(text remote_agent, args = nullptr)
	{
		return data->make_connection(remote_agent);
	}
	/*
	 * The same by ports: to the agent that listens at ipAddr and port of the arguments. These
	 * calls return at once; checkRemoteMD says on the other side, or here, what has come. An
	 * agent that was made with useListenThread listens. Keep it to a network that you trust.
	 */
	status sendLocalMD(args extra = nullptr) const { return data->send_md(extra); }
	status sendLocalPartialMD(const nixl_reg_dlist_t &descs, args extra = nullptr) const
	{
		return data->send_partial_md(descs, extra);
	}
	status fetchRemoteMD(const std::string remote_name, args extra = nullptr)
	{
		return data->fetch_md(remote_name, extra);
	}
	status invalidateLocalMD(args extra = nullptr) const { return data->invalidate_md(extra); }

	/* Lists and requests. */
	status prepXferDlist(text agent_name, const nixl_xfer_dlist_t &descs,
			     nixlDlistH *&dlist_hndl, args = nullptr) const
	{
		return data->prep(agent_name, descs, dlist_hndl);
	}
	status prepXferDlist(text agent_name, const nixl_stride_dlist_t &descs,
			     nixlDlistH *&dlist_hndl, args extra = nullptr) const
	{
		nixl_xfer_dlist_t list(descs.getType());
		for (const nixlStrideDesc &d : descs)
			for (size_t i = 0; i < d.count; i++)
				list.emplace(d.addr + i * d.stride, d.len, d.devId);
		return prepXferDlist(agent_name, list, dlist_hndl, extra);
	}
	template <class List>
	status prepXferDlist(const List &descs, nixlDlistH *&dlist_hndl, args extra = nullptr) const
	{
		return prepXferDlist(NIXL_INIT_AGENT, descs, dlist_hndl, extra);
	}
	status makeXferReq(const nixl_xfer_op_t &operation, const nixlDlistH *local_side,
			   const std::vector<int> &local_indices, const nixlDlistH *remote_side,
			   const std::vector<int> &remote_indices, nixlXferReqH *&req_hndl,
			   args extra = nullptr) const
	{
		return data->make(operation, local_side, list(local_indices), remote_side,
				  list(remote_indices), req_hndl, extra);
	}
#if __cplusplus >= 202002L
	status makeXferReq(nixl_xfer_op_t operation, const nixlDlistH &local_side,
			   std::span<const int> local_indices, const nixlDlistH &remote_side,
			   std::span<const int> remote_indices, nixlXferReqH *&req_hndl,
			   args extra = nullptr) const
	{
		return data->make(operation, &local_side, list(local_indices), &remote_side,
				  list(remote_indices), req_hndl, extra);
	}
#endif
	status createXferReq(const nixl_xfer_op_t &operation, const nixl_xfer_dlist_t &local_descs,
			     const nixl_xfer_dlist_t &remote_descs, text remote_agent,
			     nixlXferReqH *&req_hndl, args extra = nullptr) const
	{
		return data->create(operation, local_descs, remote_descs, remote_agent, req_hndl,
				    extra);
	}
	/* NIXL_SUCCESS, NIXL_IN_PROG, or how it failed. */
	status postXferReq(nixlXferReqH *req_hndl, args extra = nullptr) const
	{
		return data->post(req_hndl, extra);
	}
	status getXferStatus(nixlXferReqH *req_hndl) const { return data->state(req_hndl); }
	status getXferTelemetry(const nixlXferReqH *req_hndl, nixl_xfer_telem_t &telemetry) const
	{
		return data->telemetry(req_hndl, telemetry);
	}
	status queryXferBackend(const nixlXferReqH *req_hndl, nixlBackendH *&backend) const
	{
		return data->backend_of(req_hndl, backend);
	}
	/* NIXL_ERR_NOT_FOUND until the agent has measured a transfer. */
	status estimateXferCost(const nixlXferReqH *req_hndl, std::chrono::microseconds &duration,
				std::chrono::microseconds &err_margin, nixl_cost_t &method,
				args = nullptr) const
	{
		return data->estimate(req_hndl, duration, err_margin, method);
	}
	/* Ends it: on NIXL_SUCCESS no byte of it lands any more. */
	status releaseXferReq(nixlXferReqH *req_hndl) const { return data->release(req_hndl); }
	status releasedDlistH(nixlDlistH *dlist_hndl) const { return data->release(dlist_hndl); }

	/* Messages. genNotif waits at most a second for a peer that is behind. */
	status getNotifs(nixl_notifs_t &notif_map, args = nullptr)
	{
		return data->notifs(notif_map);
	}
	status genNotif(text remote_agent, const nixl_blob_t &msg, args = nullptr) const
	{
		return data->notify(remote_agent, msg);
	}

	/* A view is for the code of a card, which has no part of sluice. */
	status prepMemView(const nixl_local_dlist_t &, nixlMemViewH &, args = nullptr) const
	{
		return none("prepMemView");
	}
	status prepMemView(const nixl_remote_dlist_t &, nixlMemViewH &, args = nullptr) const
	{
		return none("prepMemView");
	}
	void releaseMemView(nixlMemViewH) const {}

private:
	template <class Ints> static nixlAgentData::indices list(const Ints &of)
	{
		return {of.data(), of.size()};
	}
	static status none(const char *call)
	{
		return sluice_nixl::refuse(NIXL_ERR_NOT_SUPPORTED, call, "not over sluice");
	}
	std::unique_ptr<nixlAgentData> data;
};

#endif
