// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

const (
	hugeDir        = "sys/kernel/mm/hugepages/hugepages-2048kB/"
	transparentDir = "sys/kernel/mm/transparent_hugepage/"
)

// good is a machine on which nothing is missing.
var good = map[string]string{
	"proc/sys/kernel/osrelease":         "6.8.0-31-generic\n",
	"proc/cpuinfo":                      "processor\t: 0\nmodel name\t: Example CPU\n",
	"proc/self/status":                  "Name:\tx\nCpus_allowed_list:\t0-7,16-23\n",
	"proc/meminfo":                      "MemTotal:       1024 kB\nMemAvailable:    512 kB\n",
	"proc/self/limits":                  limits("unlimited", "1048576"),
	"proc/sys/kernel/yama/ptrace_scope": "0\n",
	"proc/sys/kernel/numa_balancing":    "0\n",
	"proc/sys/net/core/wmem_max":        "16777216\n",
	"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages":   "64\n",
	"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "64\n",
	"sys/kernel/mm/transparent_hugepage/enabled":              "always [madvise] never\n",
	"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] " +
		"never deny force\n",
	"proc/sys/vm/max_map_count":             "65530\n",
	"sys/devices/system/node/has_memory":    "0-1\n",
	"sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
}

func limits(memlock, files string) string {
	return "Limit                     Soft Limit           Hard Limit           Units     \n" +
		"Max locked memory         " + memlock + "             " + memlock +
		"              bytes     \n" +
		"Max open files            " + files + "             1048576              files     \n"
}

// machineOf writes a machine with changes to good; "-" removes a file.
func machineOf(t *testing.T, changes map[string]string) Source {
	t.Helper()
	root := t.TempDir()
	write := func(files map[string]string) {
		for p, text := range files {
			p = filepath.Join(root, p)
			if text == "-" {
				require.NoError(t, os.RemoveAll(p))
				continue
			}
			require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
			require.NoError(t, os.WriteFile(p, []byte(text), 0o644))
		}
	}
	write(good)
	write(changes)
	s := Source{Root: root}
	for _, name := range []string{"mem", "shm", "tcp", "posix", "ucx", "rdma"} {
		s.Backends = append(s.Backends, Backend{name, true, func() error { return nil }})
	}
	s.Backends = append(s.Backends, Backend{"cuda", false, nil})
	return s
}

func find(t *testing.T, r Report, name string) Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q", name)
	return Check{}
}

func TestGoodMachineHasNothingToMend(t *testing.T) {
	r := Examine(machineOf(t, nil))
	for _, c := range r.Checks {
		if c.State != OK || c.Fix != "" {
			t.Errorf("%s: %s, found %q, fix %q", c.Name, c.State, c.Found, c.Fix)
		}
	}
	for _, b := range r.Backends {
		require.Equal(t, OK, b.State, "%+v", b)
	}
	m := r.Machine
	if m.CPUs != 16 || m.Nodes != 2 || m.MemoryTotal != 1<<20 || m.CPU != "Example CPU" {
		t.Errorf("machine = %+v", m)
	}
}

func TestFindings(t *testing.T) {
	cases := []struct {
		name    string
		changes map[string]string
		check   string
		state   State
		found   string
		fix     string
		backend string // that gets the same state
	}{
		{"memlock", map[string]string{"proc/self/limits": limits("8388608", "1048576")},
			"memlock", Limited, "8 MiB", "ulimit -l unlimited", "ucx"},
		{"few files", map[string]string{"proc/self/limits": limits("unlimited", "1024")},
			"open-files", Limited, "1024", "ulimit -n", "tcp"},
		{"no huge pages", map[string]string{hugeDir + "nr_hugepages": "0",
			hugeDir + "free_hugepages": "0"},
			"huge-pages", Limited, "0 of 2 MiB reserved", "vm.nr_hugepages", "shm"},
		{"shmem never",
			map[string]string{transparentDir + "shmem_enabled": "always within_size advise " +
				"[never] deny force"},
			"shared-huge-pages", Limited, "never", "echo advise", "shm"},
		{"thp never", map[string]string{transparentDir + "enabled": "always madvise [never]"},
			"transparent-huge-pages", Limited, "never", "echo madvise", "mem"},
		{"yama", map[string]string{"proc/sys/kernel/yama/ptrace_scope": "1"},
			"ptrace-scope", Limited, "1 (children only)", "ptrace_scope=0", "shm"},
		{"no yama", map[string]string{"proc/sys/kernel/yama": "-"}, "ptrace-scope", OK, "no Yama",
			"", "mem"},
		{"old kernel", map[string]string{"proc/sys/kernel/osrelease": "5.4.0"}, "kernel", Limited,
			"5.4.0", "", "posix"},
		{"small socket buffers", map[string]string{"proc/sys/net/core/wmem_max": "212992"},
			"socket-buffers", Limited, "208 KiB", "wmem_max", "tcp"},
		{"few mappings", map[string]string{"proc/sys/vm/max_map_count": "1000"}, "mappings",
			Limited, "1000", "max_map_count", "shm"},
		{"balancing", map[string]string{"proc/sys/kernel/numa_balancing": "1"},
			"numa", Limited, "balancing on", "numa_balancing=0", "shm"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			r := Examine(machineOf(t, tc.changes))
			c := find(t, r, tc.check)
			if c.State != tc.state || !strings.Contains(c.Found, tc.found) {
				t.Errorf("%s is %s, found %q; want %s, %q", c.Name, c.State, c.Found, tc.state,
					tc.found)
			}
			if tc.fix == "" && c.Fix != "" || !strings.Contains(c.Fix, tc.fix) {
				t.Errorf("fix %q, want %q", c.Fix, tc.fix)
			}
			for _, b := range r.Backends {
				if b.Name == tc.backend && b.State != tc.state {
					t.Errorf("backend %s is %s, want %s", b.Name, b.State, tc.state)
				}
			}
		})
	}
}

// TestRefusedCalls has a seccomp profile that refuses what shm needs.
func TestRefusedCalls(t *testing.T) {
	s := machineOf(t, nil)
	s.MemFD = func() error { return unix.EPERM }
	s.ProcessVM = func() error { return unix.EPERM }
	r := Examine(s)
	for name, want := range map[string]State{"memfd": Missing, "process-vm": Limited} {
		c := find(t, r, name)
		if c.State != want || !strings.Contains(c.Found, "refused") || c.Fix == "" {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// TestBackendThatDoesNotOpen: the report says why and what mends it, and nothing twice.
func TestBackendThatDoesNotOpen(t *testing.T) {
	s := machineOf(t, nil)
	s.Backends[0].Open = func() error { return errors.New("no luck") }
	s.Backends[1].Open = func() error {
		return &driver.UnavailableError{Backend: "shm", Reason: "no room", Fix: "try"}
	}
	r := Examine(s)
	require.Equal(t, Verdict{"mem", Missing, []string{"open-mem: no luck"}}, r.Backends[0])
	c := find(t, r, "open-shm")
	require.Equal(t, []string{"no room", "try"}, []string{c.Found, c.Fix})
	s.Known = []Check{{Name: "room", State: Missing, Found: "no room",
		Backends: []string{"shm"}}}
	require.Equal(t, []string{"room: no room"}, Examine(s).Backends[1].Notes)
}

// TestBackendThatIsNotBuilt: what only it needs is not told.
func TestBackendThatIsNotBuilt(t *testing.T) {
	s := machineOf(t, nil)
	s.Known = []Check{
		{Name: "cgo", State: NotBuilt, Found: "needs cgo", Backends: []string{"cuda"}},
		{Name: "card", State: Missing, Found: "none", Backends: []string{"cuda"}}}
	r := Examine(s)
	require.Equal(t, Verdict{"cuda", NotBuilt, []string{"needs cgo"}}, r.Backends[6])
	require.Equal(t, NotBuilt, find(t, r, "cgo").State)
	require.False(t, slices.ContainsFunc(r.Checks, func(c Check) bool { return c.Name == "card" }))
}

func TestMemlockWithoutACard(t *testing.T) {
	r := Examine(machineOf(t, map[string]string{"proc/self/limits": limits("8388608", "1048576"),
		"sys/class/infiniband": "-"}))
	if c := find(t, r, "memlock"); slices.Contains(c.Backends, "ucx") {
		t.Errorf("UCX pins nothing over sockets: %+v", c)
	}
}

func TestEmptyMachineIsAnsweredToo(t *testing.T) {
	s := machineOf(t, nil)
	s.Root = t.TempDir()
	r := Examine(s)
	require.True(t, slices.ContainsFunc(r.Checks, func(c Check) bool { return c.Fix != "" }),
		"nothing to mend on an empty machine")
}

func TestRunningMachine(t *testing.T) {
	r := Examine(Source{})
	if r.Machine.CPUs < 1 || r.Machine.Kernel == "" || r.Machine.MemoryTotal == 0 {
		t.Errorf("machine = %+v", r.Machine)
	}
}

func TestCountList(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-3": 4, "0-1,4,8-11": 7, "": 0, "x": 0,
		"3-1": 0} {
		if got := countList(list); got != want {
			t.Errorf("countList(%q) = %d, want %d", list, got, want)
		}
	}
}
