// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"os"
	"path/filepath"
	"strings"
)

// libraries are opened at run time by the backends; doctor looks for the same
// names, without opening them.
var libraries = []struct {
	name     string
	sonames  []string
	backends string
	fix      string
}{
	{"libucp", []string{"libucp.so.0"}, "ucx", "apt-get install libucx0"},
	{"libibverbs", []string{"libibverbs.so.1"}, "rdma", "apt-get install libibverbs1 " +
		"ibverbs-providers"},
	{"libcuda", []string{"libcuda.so.1"}, "cuda gds", "install the NVIDIA driver; " +
		"containers: --gpus all"},
	{"libcufile", []string{"libcufile.so.0", "libcufile.so"}, "gds", "install libcufile of the " +
		"CUDA toolkit"},
}

func libraryChecks(s *Source) []Check {
	dirs := s.libraryDirs()
	var checks []Check
	for _, l := range libraries {
		c := Check{Name: l.name, State: OK, Backends: backendsOf(l.backends),
			Why: "opened at run time"}
		if c.Found = findLibrary(dirs, l.sonames); c.Found == "" {
			c.State, c.Found, c.Fix = Missing, l.sonames[0]+" not found", l.fix
		}
		checks = append(checks, c)
	}
	return append(checks, s.nvidiaModules()...)
}

// nvidiaModules are kernel modules without which a NIC or a disk reaches device
// memory by a detour.
func (s *Source) nvidiaModules() []Check {
	if len(s.glob("dev/nvidia[0-9]*")) == 0 {
		return nil // the missing card says it all
	}
	fs := Check{Name: "nvidia-fs", State: OK, Found: "loaded", Backends: backendsOf("gds"),
		Why: "without it cuFile works in compatibility mode, through host memory"}
	if !s.module("nvidia_fs") {
		fs.State, fs.Found, fs.Fix = Limited, "not loaded", "modprobe nvidia-fs"
	}
	return []Check{fs}
}

func findLibrary(dirs, sonames []string) string {
	for _, soname := range sonames {
		for _, dir := range dirs {
			p := filepath.Join(dir, soname)
			if _, err := os.Stat(p); err == nil {
				return p
			}
		}
	}
	return ""
}

// libraryDirs is where the dynamic loader looks: the caller's directories, those
// of ld.so.conf, and the built-in ones.
func (s *Source) libraryDirs() []string {
	dirs := append([]string{}, s.LibraryDirs...)
	for _, conf := range append(s.glob("etc/ld.so.conf.d/*.conf"), s.path("etc/ld.so.conf")) {
		b, err := os.ReadFile(conf)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, "/") {
				dirs = append(dirs, s.path(line))
			}
		}
	}
	for _, p := range []string{"lib", "usr/lib", "lib64", "usr/lib64", "usr/local/lib",
		"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/cuda/lib64"} {
		dirs = append(dirs, s.path(p))
	}
	return dirs
}
