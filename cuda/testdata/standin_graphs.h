/* SPDX-License-Identifier: Apache-2.0 */
/* What the stand-in captures of a stream, and replays. */
#ifndef STANDIN_GRAPHS_H
#define STANDIN_GRAPHS_H

#define GRAPH_MAX 8

struct CUgraph_st {
	int n;
	struct operation list[GRAPH_MAX];
};

struct CUgraphExec_st {
	struct CUgraph_st graph;
};

static CUresult record(struct CUgraph_st *g, const struct operation *o)
{
	if (g->n == GRAPH_MAX || o->staged)
		return NOT_SUPPORTED;
	g->list[g->n++] = *o;
	return 0;
}

CUresult cuStreamBeginCapture_v2(CUstream s, CUstreamCaptureMode mode)
{
	CONTEXT();
	if (!s || s->capture || mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
		return INVALID_VALUE;
	s->capture = calloc(1, sizeof *s->capture);
	return 0;
}

CUresult cuStreamEndCapture(CUstream s, CUgraph *g)
{
	CONTEXT();
	*g = s->capture;
	s->capture = NULL;
	return *g ? 0 : CAPTURE_UNMATCHED;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *e, CUgraph g, unsigned long long flags)
{
	CONTEXT();
	if (!g->n || flags)
		return INVALID_VALUE;
	*e = malloc(sizeof **e);
	(*e)->graph = *g;
	return 0;
}

CUresult cuGraphLaunch(CUgraphExec e, CUstream s)
{
	CUresult rc = 0;

	CONTEXT();
	if (!e || !s || s->capture)
		return INVALID_VALUE;
	for (int i = 0; i < e->graph.n; i++)
		if (e->graph.list[i].kernel &&
		    e->graph.list[i].shared > e->graph.list[i].kernel->shared)
			return INVALID_VALUE;
	for (int i = 0; i < e->graph.n && !rc; i++)
		rc = enqueue(s, e->graph.list[i]);
	return rc;
}

CUresult cuGraphExecDestroy(CUgraphExec e)
{
	CONTEXT();
	free(e);
	return 0;
}

CUresult cuGraphDestroy(CUgraph g)
{
	CONTEXT();
	free(g);
	return 0;
}

#endif
