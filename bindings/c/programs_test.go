// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/etcdtest"
	"github.com/sluicehq/sluice/kv/directory"
	"github.com/sluicehq/sluice/kv/directory/etcd"
)

// sanitizers watch the program and what it hands over; the library itself is not built with them.
var sanitizers = []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}

// TestPrograms runs the programs in C and C++, one for each behaviour that the tests of the Python
// package, which calls the same functions, cannot show.
func TestPrograms(t *testing.T) {
	for _, source := range []string{
		"hello.c", "misuse.c", "fds.c", "endings.c", "threads.c", "forks.c", "raii.cpp",
		"unproven.cpp", "exits.c", "kv.c", "cluster.c", "handoff.c",
		"ring.c", "sparse.c",
	} {
		t.Run(source, func(t *testing.T) { run(t, compile(t, source, sanitizers...)) })
	}
}

// TestEtcd has the nodes of that program be those of an etcd, under a prefix of their own.
func TestEtcd(t *testing.T) {
	program := compile(t, "cluster.c", sanitizers...)
	urls := etcdtest.URLs(etcdtest.Start(t, 1))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, err := etcd.Open(ctx, etcd.Config{Endpoints: urls, Prefix: "test", Lease: time.Minute})
	require.NoError(t, err)
	defer d.Close()
	folder := t.TempDir()
	for _, name := range []string{"a", "b"} {
		m, err := d.Join(ctx, directory.Node{Name: name, Weight: 1,
			Addresses: []string{"unix:" + filepath.Join(folder, name+".sock")}})
		require.NoError(t, err)
		defer func() { _ = m.Leave(ctx) }()
	}
	run(t, program, folder, "etcd", strings.Join(urls, ",")+"/test")
}

// TestSignals: the program loads the library after it has installed its handlers, which is
// also when a sanitizer would have taken some of them.
func TestSignals(t *testing.T) {
	run(t, compile(t, "signals.c", "-Wl,--as-needed"), filepath.Join(built, "libsluice.so.1"))
}

// TestArchive links the first program with libsluice.a.
func TestArchive(t *testing.T) {
	archive := filepath.Join(t.TempDir(), "libsluice.a")
	require.NoError(t, library("c-archive", "-s -w", archive))
	program := filepath.Join(t.TempDir(), "hello")
	require.NoError(t,
		command("gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I.", "-o", program,
			"testdata/hello.c", archive,
			"-lpthread", "-ldl"))
	run(t, program)
}

// TestNIXL compiles a program for NIXL with our header, as C++17 and as C++20, which has more
// overloads, and runs it over shared memory and sockets. TestNIXLPorts runs the header as C++17.
func TestNIXL(t *testing.T) {
	needCPP(t)
	require.NoError(t, command("g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
		"-I.", "-Inixl", "testdata/nixl.cpp"))
	runNIXL(t, "-std=c++20", "-O0")
}

// TestSoakNIXL has the compiler look closer.
func TestSoakNIXL(t *testing.T) {
	for _, standard := range []string{"-std=c++17", "-std=c++20"} {
		t.Run(standard, func(t *testing.T) { runNIXL(t, standard, "-O2") })
	}
}

func runNIXL(t *testing.T, flags ...string) {
	program := compile(t, "nixl.cpp", slices.Concat([]string{"-Inixl"}, flags, sanitizers)...)
	for _, plugin := range []string{"UCX", "TCP"} {
		t.Run(plugin, func(t *testing.T) { run(t, program, plugin, t.TempDir()) })
	}
}

// TestNIXLPorts has agents exchange their metadata by ports, in one process and in two.
func TestNIXLPorts(t *testing.T) {
	program := compile(t, "nixl_ports.cpp", append([]string{"-Inixl", "-O0"}, sanitizers...)...)
	for _, plugin := range []string{"UCX", "TCP"} {
		t.Run(plugin, func(t *testing.T) { run(t, program, plugin) })
	}
}
