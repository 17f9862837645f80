// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bufio"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/cache"
)

// TestTimedFrozenClient: a client that is stopped while it stores and loads keeps others from
// nothing, and goes on when it continues.
func TestTimedFrozenClient(t *testing.T) {
	c, path := openServer(t)
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+path)
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	child.Stderr = os.Stderr
	require.NoError(t, child.Start())
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	for range 5 {
		require.NoError(t, child.Process.Signal(syscall.SIGSTOP))
		for from := uint64(1000); from < 1064; from += 8 { // all that the cache has room for, twice
			keys := keysOf(from, 8)
			u.fill(keys)
			outcomes, err := u.Store(t.Context(), keys, u.place(0, 8))
			require.NoError(t, err)
			require.Subset(t, []cache.Outcome{cache.Done, cache.Known}, outcomes)
			outcomes, err = u.Load(t.Context(), keys, u.place(8, 8))
			require.NoError(t, err)
			// what the server still does for the other one may have blocks go
			require.Subset(t, []cache.Outcome{cache.Done, cache.Missing}, outcomes)
			for k, o := range outcomes {
				if o == cache.Done {
					require.Equal(t, u.mem[k*blockBytes:][:blockBytes],
						u.mem[(8+k)*blockBytes:][:blockBytes])
				}
			}
		}
		require.NoError(t, child.Process.Signal(syscall.SIGCONT))
		require.True(t, lines.Scan())
	}
	require.NoError(t, u.Client.Close(t.Context()))
	require.Zero(t, c.Stats().Unproven)
}
