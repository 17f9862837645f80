// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// limit is for what takes a moment on a machine that has nothing else to do.
const limit = 10 * time.Minute

// build makes the program of a folder here.
func build(t *testing.T, folder string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), folder)
	command(t, "go", "build", "-o", program, "./"+folder)
	return program
}

// command runs one that must succeed, and returns what it prints.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s%s", name, args, err, out, &stderr)
	}
	return string(out)
}

// TestBackend has a backend of another module pass the conformance suite.
func TestBackend(t *testing.T) { command(t, "go", "-C", "backend", "test", "./...") }

// want compares what a program has printed.
func want(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("printed %q, want %q", got, want)
	}
}

// handOver runs both sides of a program, in processes of their own, and returns what decode prints.
func handOver(t *testing.T, program string, how ...string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv") // t.TempDir may be too long for the name of a socket
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	args := append(how, filepath.Join(dir, "socket"))
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	decode := exec.CommandContext(ctx, program, append([]string{"decode"}, args...)...)
	decode.Stderr = os.Stderr
	pipe, err := decode.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, decode.Start())
	out := bufio.NewReader(pipe)
	if line, err := out.ReadString('\n'); err != nil || line != "serving\n" {
		t.Errorf("decode says %q, %v", line, err)
	} else {
		want(t, command(t, program, append([]string{"prefill"}, args...)...), "")
	}
	rest, _ := io.ReadAll(out)
	if err := decode.Wait(); err != nil {
		t.Errorf("decode: %v", err)
	}
	return string(rest)
}

func TestHandover(t *testing.T) {
	want(t, handOver(t, build(t, "handover")), "layer 0: keys and values\nprefill has gone\n")
}

func TestPages(t *testing.T) {
	want(t, command(t, build(t, "pages")), "past the end of the lease: refused\n"+
		"2048 blocks of 656 bytes are in place\nafter Revoke: refused\n")
}

// TestCachenode runs the program with a cache of its own.
func TestCachenode(t *testing.T) {
	want(t, command(t, build(t, "cachenode")), "0 there, stored [done done done done], "+
		"loaded [done done done done]: block 3\n")
}
