// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// meetCache opens a driver on a lane of a cache, with its target unless it has both.
func meetCache(t *testing.T, lane bench.Lane, name string, args ...string) end {
	t.Helper()
	request := bench.Request{Lane: string(lane), Role: bench.RoleInitiator, Bytes: 1 << 20,
		FarBytes: 1 << 20}
	if name == "cache" && (args[0] == "own" || lane == bench.CacheDisk) {
		e, _ := opened(t, name, args, request)
		return e
	}
	request.Role = bench.RoleTarget
	target, theirs := opened(t, name, args, request)
	request.Role = bench.RoleInitiator
	e, ours := opened(t, name, args, request)
	require.NoError(t, e.Connect(theirs.Card))
	require.NoError(t, target.Connect(ours.Card))
	return e
}

// TestCaches loads, stores and matches, by a cache in each of its places, and by Redis.
func TestCaches(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		lane bench.Lane
		name string
		args []string
	}{
		{bench.CacheShm, "cache", []string{"first", "shm"}},
		{bench.CacheShm, "cache", []string{"own", "shm"}},
		{bench.CacheTCP, "cache", []string{"each",
			"tcp:listen=127.0.0.1:0,plaintext=true"}},
		{bench.CacheDisk, "cache", []string{"dir=" + dir, "shm", "posix"}},
		{bench.CacheShm, "redis", nil},
		{bench.CacheTCP, "redis", nil},
	} {
		t.Run(fmt.Sprint(c.lane, c.name, c.args), func(t *testing.T) {
			if _, err := exec.LookPath("redis-server"); c.name == "redis" && err != nil {
				drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "redis",
					Reason: err.Error(), Fix: "apt-get install redis-server"})
			}
			e := meetCache(t, c.lane, c.name, c.args...)
			for _, op := range []string{bench.OpWrite, bench.OpRead, bench.OpMatch} {
				p, err := e.Prepare(op, 4<<10, []int32{3, 0, 7}, []int32{5, 9, 2})
				require.NoError(t, err, op)
				for range 2 {
					if reset, ok := p.(bench.Resetter); ok {
						err := reset.Reset(t.Context())
						if c.lane == bench.CacheDisk && op == bench.OpRead {
							require.ErrorIs(t, err, bench.ErrUnsupported, "a load from memory")
							continue
						}
						require.NoError(t, err)
					}
					if op == bench.OpRead {
						clear(e.Memory())
					}
					require.NoError(t, p.Post(t.Context()), op)
					if op == bench.OpRead {
						want := make([]byte, 4<<10)
						fill(want, keysOf([]int32{9})[0])
						require.Equal(t, want, e.Memory()[:4<<10])
					}
				}
				require.NoError(t, p.Close())
			}
			_, err := e.Prepare(bench.OpDurable, 656, []int32{1}, []int32{1})
			require.ErrorIs(t, err, bench.ErrUnsupported)
		})
	}
	for _, folder := range []string{dir, "/dev/shm"} {
		left, err := filepath.Glob(fmt.Sprintf("%s/sluice-bench-%d*", folder, os.Getpid()))
		require.NoError(t, err)
		require.Empty(t, left)
	}
}

// TestStoreThatIsKnown is no measurement: nothing was copied.
func TestStoreThatIsKnown(t *testing.T) {
	e := meetCache(t, bench.CacheShm, "cache", "own", "shm")
	p, err := e.Prepare(bench.OpWrite, 4<<10, []int32{1}, []int32{1})
	require.NoError(t, err)
	require.ErrorContains(t, p.Post(t.Context()), "known")
	require.NoError(t, p.(bench.Resetter).Reset(t.Context()))
	require.NoError(t, p.Post(t.Context()))
	require.Contains(t, e.(bench.Remarker).Remark(), "holds up its caller for")
	require.Empty(t, e.(bench.Remarker).Remark(), "nothing was posted since")
	_, err = e.Open(&bench.Request{Lane: string(bench.CacheDisk)})
	require.ErrorIs(t, err, bench.ErrUnsupported)
	_, err = e.Open(&bench.Request{Lane: string(bench.CacheShm), Threads: 2})
	require.ErrorIs(t, err, bench.ErrUnsupported)
}
