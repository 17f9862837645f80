// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/stretchr/testify/require"
)

// TestC installs the library, builds the program by the line in its head, and runs it.
func TestC(t *testing.T) {
	for _, tool := range []string{"cc", "make", "pkg-config"} {
		if _, err := exec.LookPath(tool); err != nil {
			drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "C",
				Reason: err.Error(), Fix: "apt-get install gcc make pkg-config"})
		}
	}
	prefix := t.TempDir()
	command(t, "make", "-C", "..", "--no-print-directory", "install", "PREFIX="+prefix)
	t.Setenv("PKG_CONFIG_PATH", filepath.Join(prefix, "lib", "pkgconfig"))
	t.Setenv("LD_LIBRARY_PATH", filepath.Join(prefix, "lib"))
	header, err := os.ReadFile(filepath.Join(prefix, "include", "sluice.h"))
	require.NoError(t, err)
	version := command(t, "pkg-config", "--modversion", "sluice")
	require.Contains(t, string(header), "#define SLUICE_VERSION \""+strings.TrimSpace(version)+"\"")
	program := filepath.Join(prefix, "handover")
	command(t, "sh", "-c", "cc -Wall -Wextra -Werror -o "+program+" c/handover.c $(pkg-config "+
		"--cflags --libs sluice)")
	for _, backend := range []string{"shm", "tcp"} {
		t.Run(backend, func(t *testing.T) {
			want(t, handOver(t, program, backend), "layer 0: keys and values\n")
		})
	}
}
