// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/peers"
)

func TestPortAsPerftestSpellsIt(t *testing.T) {
	for _, c := range []struct {
		port rdma.PortFinding
		want bench.VerbsPort
	}{
		{rdma.PortFinding{Name: "mlx5_0:2", GIDs: []rdma.GIDFinding{{Index: 1},
			{Index: 3, Chosen: true}}}, bench.VerbsPort{Device: "mlx5_0", Port: 2, GID: 3}},
		{rdma.PortFinding{Name: "mlx4_0"}, bench.VerbsPort{Device: "mlx4_0", Port: 1}},
	} {
		if got := verbsPort(c.port); got != c.want {
			t.Errorf("%+v, want %+v", got, c.want)
		}
	}
}

func TestLanesOfUCX(t *testing.T) {
	e := &end{}
	if _, err := e.Open(&peers.Request{Lane: "file"}); !errors.Is(err, peers.ErrUnsupported) {
		t.Errorf("lane file: %v", err)
	}
	if a, err := e.Open(&peers.Request{Lane: "tcp"}); err != nil || a.Settings == "" ||
		e.test == nil {
		t.Fatalf("%+v, %v", a, err)
	}
	for op, want := range map[string]string{"write": "ucp_put_bw", "read": "ucp_get"} {
		p, err := e.Prepare(op, 4096, make([]int32, 3), nil)
		require.NoError(t, err)
		if run := p.(*posting).run; run.Test != want || run.Size != 4096 || run.Window != 3 {
			t.Errorf("%+v", run)
		}
	}
}
