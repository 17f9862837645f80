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
	"proc/sys/kernel/io_uring_disabled": "0\n",
	"proc/sys/kernel/numa_balancing":    "0\n",
	"proc/sys/net/core/wmem_max":        "16777216\n",
	"proc/modules":                      "nvidia_fs 1 0 - Live 0x0\n",
	"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages":   "64\n",
	"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "64\n",
	"sys/kernel/mm/transparent_hugepage/enabled":              "always [madvise] never\n",
	"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] " +
		"never deny force\n",
	"proc/sys/vm/max_map_count":                "65530\n",
	"sys/devices/system/node/has_memory":       "0-1\n",
	"sys/class/infiniband/mlx5_0/node_type":    "1: CA\n",
	"dev/nvidia0":                              "",
	"etc/ld.so.conf.d/local.conf":              "# comment\n/opt/lib\n",
	"opt/lib/libucp.so.0":                      "",
	"usr/lib/x86_64-linux-gnu/libibverbs.so.1": "",
	"usr/lib/x86_64-linux-gnu/libcuda.so.1":    "",
	"usr/local/cuda/lib64/libcufile.so.0":      "",
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
	opens := func() error { return nil }
	return Source{Root: root, IOURing: opens, Backends: map[string]func() error{"mem": opens,
		"shm": nil}}
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
		want := NotBuilt // "ok" would be read as "there"
		if b.Build {
			want = OK
		}
		if b.Build != (b.Name == "mem" || b.Name == "shm") || b.State != want || b.Machine != OK {
			t.Errorf("backend %+v", b)
		}
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
		backend string // for which the machine gets the same state
	}{
		{"memlock", map[string]string{"proc/self/limits": limits("8388608", "1048576")},
			"memlock", Limited, "8 MiB", "ulimit -l unlimited", "ucx"},
		{"few files", map[string]string{"proc/self/limits": limits("unlimited", "1024")},
			"open-files", Limited, "1024", "ulimit -n", "tcp"},
		{"too few files", map[string]string{"proc/self/limits": limits("unlimited", "63")},
			"open-files", Missing, "63, and 64 are the least", "ulimit -n", "tcp"},
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
		{"io_uring off", map[string]string{"proc/sys/kernel/io_uring_disabled": "2"},
			"io_uring", Limited, "io_uring_disabled=2", "io_uring_disabled=0", "posix"},
		{"old kernel", map[string]string{"proc/sys/kernel/osrelease": "5.4.0"}, "kernel", Limited,
			"5.4.0", "", "posix"},
		{"small socket buffers", map[string]string{"proc/sys/net/core/wmem_max": "212992"},
			"socket-buffers", Limited, "208 KiB", "wmem_max", "tcp"},
		{"no ucx", map[string]string{"opt/lib/libucp.so.0": "-"},
			"libucp", Missing, "libucp.so.0 not found", "apt-get install libucx0", "ucx"},
		{"no NIC", map[string]string{"sys/class/infiniband/mlx5_0": "-"}, "rdma-devices", Missing,
			"none", "rdma link add", "rdma"},
		{"no InfiniBand", map[string]string{"sys/class/infiniband": "-"}, "rdma-devices", Missing,
			"none", "modprobe ib_core", "rdma"},
		{"no GPU", map[string]string{"dev/nvidia0": "-"}, "gpus", Missing, "none", "NVIDIA driver",
			"cuda"},
		{"no nvidia-fs", map[string]string{"proc/modules": "ext4 1 0 - Live 0x0\n"},
			"nvidia-fs", Limited, "not loaded", "modprobe nvidia-fs", "gds"},
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
				if b.Name == tc.backend && b.Machine != tc.state {
					t.Errorf("for backend %s the machine is %s, want %s", b.Name, b.Machine,
						tc.state)
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

func TestRefusedIOURingNamesTheProfile(t *testing.T) {
	s := machineOf(t, nil)
	s.IOURing = func() error { return unix.EPERM }
	c := find(t, Examine(s), "io_uring")
	if c.State != Limited || !strings.Contains(c.Fix, "seccomp") {
		t.Errorf("refused ring: %+v", c)
	}
}

func TestBackendThatDoesNotOpen(t *testing.T) {
	s := machineOf(t, nil)
	s.Backends["mem"] = func() error { return errors.New("no luck") }
	r := Examine(s)
	if v := r.Backends[0]; v.Name != "mem" || v.State != Missing ||
		!slices.Equal(v.Notes, []string{"open-mem: no luck"}) {
		t.Errorf("mem: %+v", v)
	}
}

// TestWhatTheCallerKnows: it takes the place of what files say, and is not said twice.
func TestWhatTheCallerKnows(t *testing.T) {
	s := machineOf(t, nil)
	s.Backends["ucx"] = func() error {
		return &driver.UnavailableError{Backend: "ucx", Reason: "no luck", Fix: "try"}
	}
	r := Examine(s)
	if c := find(t, r, "open-ucx"); c.State != Missing || c.Found != "no luck" || c.Fix != "try" {
		t.Errorf("%+v", c)
	}
	s.Known = []Check{{Name: "libucp", State: Missing, Found: "no luck", Backends: []string{"ucx"}},
		{Name: "ucx-far", State: Note, Backends: []string{"ucx"}}}
	r = Examine(s)
	if c := find(t, r, "libucp"); c.State != Missing ||
		r.Checks[len(r.Checks)-1].Name != "ucx-far" {
		t.Errorf("%+v", r.Checks)
	}
	for _, v := range r.Backends {
		if v.Name == "ucx" && !slices.Equal(v.Notes, []string{"libucp: no luck"}) {
			t.Errorf("%+v", v)
		}
	}
}

func TestMemlockWithoutACard(t *testing.T) {
	r := Examine(machineOf(t, map[string]string{"proc/self/limits": limits("8388608", "1048576"),
		"sys/class/infiniband": "-"}))
	if c := find(t, r, "memlock"); slices.Contains(c.Backends, "ucx") {
		t.Errorf("UCX pins nothing over sockets: %+v", c)
	}
}

func TestBackendsOfTheBuildComeFirst(t *testing.T) {
	s := machineOf(t, nil)
	s.Backends = map[string]func() error{"cuda": nil, "novel": nil}
	var names []string
	r := Examine(s)
	for _, v := range r.Backends {
		if v.Build {
			names = append(names, v.Name)
		}
	}
	if !slices.Equal(names, []string{"cuda", "novel"}) || !r.Backends[0].Build ||
		!r.Backends[1].Build {
		t.Errorf("backends %+v", r.Backends)
	}
	for _, name := range []string{"gpus", "ptrace-scope"} {
		if c := find(t, r, name); r.Concerns(&c) != (name == "gpus") {
			t.Errorf("check %s concerns this build: %v", name, r.Concerns(&c))
		}
	}
}

func TestEmptyMachineIsAnsweredToo(t *testing.T) {
	r := Examine(Source{Root: t.TempDir(), IOURing: func() error { return unix.ENOSYS }})
	if len(r.Checks) == 0 || len(r.Backends) != len(backendNames) {
		t.Fatalf("report of an empty machine: %+v", r)
	}
	if !slices.ContainsFunc(r.Checks, func(c Check) bool { return c.Fix != "" }) {
		t.Error("nothing to mend on an empty machine")
	}
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
