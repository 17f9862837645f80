// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/base64"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench/peers"
	"github.com/sluicehq/sluice/driver"
)

func TestRunOfAShape(t *testing.T) {
	e := &end{}
	if _, err := e.Open(&peers.Request{Lane: "tcp"}); !errors.Is(err, peers.ErrUnsupported) {
		t.Errorf("another lane: %v", err)
	}
	if err := e.Connect("no card"); err == nil {
		t.Error("it read what is no card")
	}
	require.NoError(t, e.Connect(base64.StdEncoding.EncodeToString(
		[]byte(`{"path": "/tmp/x", "bytes": 4096}`))))
	for _, c := range []struct {
		op     string
		size   uint64
		cached bool
		want   driver.Op
	}{{"write", 4096, false, driver.Write}, {"read", 656, true, driver.Read}} {
		p, err := e.Prepare(c.op, c.size, make([]int32, 5), nil)
		require.NoError(t, err)
		run := p.(*posting)
		if run.fio.Path != "/tmp/x" || run.fio.Cached != c.cached || run.shape.Op != c.want ||
			run.shape.Batch != 5 || run.shape.Size != c.size || run.shape.Spread != 4096 {
			t.Errorf("%+v", run)
		}
	}
}
