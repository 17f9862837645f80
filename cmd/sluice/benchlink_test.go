// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
)

// TestTargetFrozenBeforeItsHandshakeIsNamed: once it is ready, silence is enough to name it.
func TestTargetFrozenBeforeItsHandshakeIsNamed(t *testing.T) {
	t.Setenv(asCommand, "1") // for the process that this test starts
	f := &benchFlags{backend: "shm", threads: 1}
	l := &benchLink{}
	conn, err := l.start(f.network.args(f.backend))
	require.NoError(t, err)
	defer l.close()
	defer conn.Close()
	require.NoError(t, l.target.Send("config", benchConfig{f.backend, f.threads, 4096, bench.BackendMemory}))
	var ready benchReady
	require.NoError(t, await(t.Context(), l.target, "ready", &ready))
	list, err := f.openSameHost()
	require.NoError(t, err)
	l.side, err = bench.OpenSide(benchEngine("initiator", list), 4096, bench.BackendMemory)
	require.NoError(t, err)

	require.NoError(t, syscall.Kill(l.target.PID, syscall.SIGSTOP))
	begin := time.Now()
	err = l.explain(t.Context(), f.join(t.Context(), l, conn, 4096, 4096))
	require.ErrorIs(t, err, errSilent)
	require.ErrorContains(t, err, fmt.Sprintf("target process (pid %d) has not answered", l.target.PID))
	require.Less(t, time.Since(begin), startLimit/2)
}
