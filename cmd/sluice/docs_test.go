// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/byname"
)

// pages are the documents whose commands TestDocumentedCommands runs.
var pages = []string{"../../README.md", "../../docs/*.md", "../../CONTRIBUTING.md"}

// TestDocumentedCommands runs each command of the tool in a shell block of the documents. The
// commands of one block run in order, in one folder. A command that needs what this machine lacks
// must say so (an unavailable backend); all others must succeed. They measure and move little,
// and a process may answer late, as one of a busy machine does.
func TestDocumentedCommands(t *testing.T) { documentedCommands(t, onABusyMachine) }

// TestSoakDocumentedCommands runs them as they are printed.
func TestSoakDocumentedCommands(t *testing.T) {
	documentedCommands(t, func(line string) string { return line })
}

// onABusyMachine has a command measure and move less, and wait longer for an answer.
func onABusyMachine(line string) string {
	for command, more := range map[string]string{"bench": " --seconds 0.01 ",
		"bench --size 656 --batch 2048 --pages": " --spread 8MiB",
		"replay":                                " --model " + smallModel} {
		if strings.HasPrefix(line+" ", "./sluice "+command+" ") {
			line += more
		}
	}
	return strings.Replace(line, "--timeout 2s", "--timeout "+answerLimit.String(), 1)
}

func documentedCommands(t *testing.T, change func(line string) string) {
	ran := 0
	for _, pattern := range pages {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, file := range files {
			for _, block := range shellBlocks(t, file) {
				t.Run(filepath.Base(file)+"/"+block[0], func(t *testing.T) {
					runBlock(t, block, change)
				})
				ran += len(block)
			}
		}
	}
	require.Positive(t, ran, "no document has a command")
}

// shellBlocks returns the lines with commands of the tool of each sh block.
func shellBlocks(t *testing.T, file string) (blocks [][]string) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, part := range strings.Split(string(text), "```sh\n")[1:] {
		body, _, closed := strings.Cut(part, "```")
		require.True(t, closed, "%s: an open block", file)
		var lines []string
		for line := range strings.Lines(body) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), "  #")
			if strings.HasPrefix(line, "./sluice ") {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
		if lines != nil {
			blocks = append(blocks, lines)
		}
	}
	return blocks
}

// runBlock runs the commands of a block in a folder of their own, where ./sluice is this binary,
// and where there are the certificates that documents speak of.
func runBlock(t *testing.T, lines []string, change func(string) string) {
	dir := t.TempDir()
	require.NoError(t, os.Symlink(binary, filepath.Join(dir, "sluice")))
	spec, _ := certificates(t, 999*time.Hour)
	_, words, err := byname.Split(spec)
	require.NoError(t, err)
	for i, name := range []string{"decode-0.pem", "decode-0-key.pem", "ca.pem"} {
		_, file, _ := strings.Cut(words[i], "=")
		require.NoError(t, os.Symlink(file, filepath.Join(dir, name)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	for _, line := range lines {
		line = change(line)
		c := exec.CommandContext(ctx, "sh", "-c", "exec 2>&1; "+line)
		c.Dir = dir
		out, err := c.CombinedOutput()
		if err != nil && bytes.Contains(out, []byte("unavailable")) {
			t.Logf("%s: %s", line, out)
			continue
		}
		require.NoError(t, err, "%s\n%s", line, out)
		require.NotContains(t, string(out), "faults      0 ", "%s brings no fault about", line)
	}
}
