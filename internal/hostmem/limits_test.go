// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

// fixture makes a root with the given files.
func fixture(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
	}
	return root
}

// server is a machine of two nodes, one of them without memory of its own.
func server() map[string]string {
	const huge = "hugepages/hugepages-2048kB"
	return map[string]string{
		"proc/meminfo": "MemTotal:       1056784 kB\nMemFree:         1000 kB\nMemAvailable: " +
			"    524288 kB\n",
		"proc/self/cgroup": "0::/\n",
		"proc/self/limits": "Limit                     Soft Limit           Hard Limit           " +
			"Units     \n" +
			"Max locked memory         8388608              unlimited            bytes     \n",
		"proc/sys/vm/max_map_count": "65530\n",

		"sys/kernel/mm/" + huge + "/nr_hugepages":    "64\n",
		"sys/kernel/mm/" + huge + "/free_hugepages":  "40\n",
		"sys/kernel/mm/" + huge + "/resv_hugepages":  "8\n",
		"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
		"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise " +
			"[never] deny force\n",
		"sys/devices/system/node/has_memory": "0,2-3\n",
	}
}

func TestLimitsOfAServer(t *testing.T) {
	got := LimitsAt(fixture(t, server()))
	want := Machine{
		Total: 1056784 << 10, Available: 524288 << 10,
		HugeReserved: 64, HugeFree: 32,
		TransparentHuge: "madvise", ShmemHuge: "never",
		Nodes:   []int{0, 2, 3},
		Memlock: 8 << 20, MapsMax: 65530,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestLimitsInACgroup(t *testing.T) {
	files := server()
	files["proc/self/cgroup"] = "12:cpu:/x\n0::/pods/one\n"
	files["sys/fs/cgroup/pods/one/memory.max"] = "max\n"
	files["sys/fs/cgroup/pods/memory.max"] = fmt.Sprintln(100 << 20)
	files["sys/fs/cgroup/pods/memory.current"] = fmt.Sprintln(70 << 20)
	files["sys/fs/cgroup/pods/memory.stat"] = "anon 1\ninactive_file 20971520\nactive_file 1\n"
	got := LimitsAt(fixture(t, files))
	if got.Total != 100<<20 || got.Available != 50<<20 {
		t.Errorf("total %d, available %d: want 100 MiB and 50 MiB", got.Total, got.Available)
	}
}

// TestLimitsInACgroupOfVersion1: its controllers have hierarchies of their own.
func TestLimitsInACgroupOfVersion1(t *testing.T) {
	files := server()
	files["proc/self/cgroup"] = "12:cpu:/x\n4:memory:/pods/one\n0::/\n"
	files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
	files["sys/fs/cgroup/memory/pods/one/memory.limit_in_bytes"] = fmt.Sprintln(100 << 20)
	files["sys/fs/cgroup/memory/pods/one/memory.usage_in_bytes"] = fmt.Sprintln(70 << 20)
	files["sys/fs/cgroup/memory/pods/one/memory.stat"] = "inactive_file " +
		"1\ntotal_inactive_file 20971520\n"
	got := LimitsAt(fixture(t, files))
	if got.Total != 100<<20 || got.Available != 50<<20 {
		t.Errorf("total %d, available %d: want 100 MiB and 50 MiB", got.Total, got.Available)
	}
}

func TestLimitsWithNothingToRead(t *testing.T) {
	got := LimitsAt(t.TempDir())
	require.Zero(t, got)
}

func TestLimitsUnlimitedMemlock(t *testing.T) {
	files := server()
	files["proc/self/limits"] = "Max locked memory         unlimited            unlimited        " +
		"    bytes     \n"
	if got := LimitsAt(fixture(t, files)).Memlock; got != math.MaxUint64 {
		t.Errorf("memlock %d", got)
	}
}

func TestLimitsOfThisMachine(t *testing.T) {
	m := Limits()
	if m.Total == 0 || m.Available == 0 || m.Available > m.Total || m.MapsMax == 0 {
		t.Errorf("%+v", m)
	}
}

func FuzzSysfs(f *testing.F) {
	for _, text := range []string{"0-3,5", "a [b] c", "[", "0::/x/../..", "5-2", "-1",
		"0-99999999999", "MemTotal:"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, id := range parseList(text) {
			if id < 0 || id >= nodesMax {
				t.Errorf("node %d of %q", id, text)
			}
		}
		chosen(text)
		field(text, "MemTotal:")
	})
}
