// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// built is where this run's libraries lie; TestMain takes it away.
var built string

func TestMain(m *testing.M) {
	var err error
	if built, err = os.MkdirTemp("", "sluice-c-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(built)
	os.Exit(code)
}

// library builds the library as make capi does. With -buildmode=c-archive and c-shared, go build
// has gcc compile all C code of the module each time; go run takes it from the cache.
func library(mode, ldflags, out string) error {
	return command("go", "run", "-buildmode="+mode, "-ldflags", ldflags, "-exec", "cp", ".", out)
}

// sharedLibrary builds libsluice.so, once a run.
var sharedLibrary = sync.OnceValue(func() error {
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	name := filepath.Join(built, "libsluice.so.1")
	flags := "-s -w -extldflags '-Wl,-soname,libsluice.so.1 -Wl,--version-script=" +
		filepath.Join(here, "exports.map") + "'"
	if err := library("c-shared", flags, name); err != nil {
		return err
	}
	return os.Symlink("libsluice.so.1", filepath.Join(built, "libsluice.so"))
})

// command runs one that must succeed.
func command(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// compile makes a program of testdata, or of elsewhere when the name is a path, that finds
// the shared library where it lies.
func compile(t testing.TB, source string, flags ...string) string {
	t.Helper()
	require.NoError(t, sharedLibrary())
	if !strings.Contains(source, "/") {
		source = filepath.Join("testdata", source)
	}
	out := filepath.Join(t.TempDir(), strings.TrimSuffix(filepath.Base(source),
		filepath.Ext(source)))
	compiler, standard := "gcc", "-std=gnu11"
	if filepath.Ext(source) == ".cpp" {
		compiler, standard = "g++", "-std=c++17"
		needCPP(t)
	}
	args := append([]string{standard, "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I.",
		"-o", out, source}, flags...)
	require.NoError(t, command(compiler, append(args, "-L"+built, "-lsluice", "-Wl,-rpath,"+built,
		"-ldl")...))
	return out
}

func needCPP(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("g++"); err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "C++",
			Reason: err.Error(), Fix: "apt-get install g++"})
	}
}

// run starts a program that says ok at its end.
func run(t *testing.T, program string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, program, args...)
	c.WaitDelay = 10 * time.Second
	// What only memory of the Go heap points to is no leak, and the sanitizer does not look there.
	c.Env = append(os.Environ(), "ASAN_OPTIONS=detect_leaks=0")
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil || !strings.HasSuffix(stdout.String(), "ok\n") {
		t.Fatalf("%s: %v\n%s%s", filepath.Base(program), err, &stdout, &stderr)
	}
}
