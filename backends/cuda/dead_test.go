// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bufio"
	"encoding/hex"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestProcessThatDiesInABatch has a process be killed with a batch under way. Its copies may go on,
// in a context that a child of it keeps: other memory comes under the range before a fence ends.
// Then the process keeps no place.
func TestProcessThatDiesInABatch(t *testing.T) {
	r, far := newFarRig(t, testConfig())
	d, o := r.shared(far, 1<<20)
	token, err := d.m.AppendToken(nil)
	require.NoError(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(),
		knockVariable+"="+string(r.b.Addr())+" "+hex.EncodeToString(token))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	text, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "true\n", text, "a batch is counted")
	memory := func() uint64 {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.id
	}
	before, want := memory(), r.content(d)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	_ = in.Close()
	require.NoError(t, d.m.Revoke(t.Context()))
	if memory() == before {
		promise.Breaks(t, "the memory that a dead process may write to is in use")
	}
	r.same("the memory that came", r.content(d), want)
	require.Eventually(t, func() bool {
		clients := 0
		r.b.server.each(func(*client) { clients++ })
		return clients == 1
	}, limit, time.Millisecond, "the dead process keeps its place")
}
