// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
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

// TestTimedClientThatTakesNoAnswer: it is disconnected, and so learns that none
// comes.
func TestTimedClientThatTakesNoAnswer(t *testing.T) {
	_, s, path := openWhole(t)
	s.limit = 20 * time.Millisecond
	e, err := openEngine("mute", func(c *engine.Config) { c.NotificationsMax = 1 })
	require.NoError(t, err)
	p, err := e.Dial(t.Context(), "unix", path)
	require.NoError(t, err)
	hello := request{number: version}
	require.NoError(t, p.Notify(t.Context(), hello.append(head(kindHello, 1))))
	until(func() bool { return s.Report().Clients == 1 })
	for s.Report().Clients == 1 {
		soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		_ = p.Notify(soon, hello.append(head(kindHello, 1)))
		cancel()
	}
	for n := (engine.Notification{}); n.Err == nil; {
		n, err = e.Next(t.Context())
		require.NoError(t, err)
	}
	require.NoError(t, e.Close())
}
