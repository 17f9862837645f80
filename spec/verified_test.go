// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// verifiedFile holds what spin found of each model when it last changed.
const verifiedFile = "verified.txt"

const recordCommand = "go test ./spec -run TestModels -update"

const verifiedHead = "# What spin found: hash of model and flags, spin's version, states, " +
	"model.\n# Written by `" + recordCommand + "`.\n"

// verified is a line of verifiedFile, less the model's name.
type verified struct {
	hash   string // of the model and of all that decides what spin finds
	spin   string // version
	states int    // up to the first fault
}

func readVerified(t *testing.T) map[string]verified {
	t.Helper()
	text, err := os.ReadFile(verifiedFile)
	require.NoError(t, err)
	known := map[string]verified{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		cells := strings.SplitN(strings.TrimSpace(line), " ", 4)
		require.Len(t, cells, 4, "%s: %s", verifiedFile, line)
		v := verified{hash: cells[0], spin: cells[1]}
		_, err := fmt.Sscan(cells[2], &v.states)
		require.NoError(t, err, "%s: %s", verifiedFile, line)
		known[cells[3]] = v
	}
	return known
}

// verifiedText is the file in the order of the models.
func verifiedText(found map[string]verified) []byte {
	var text bytes.Buffer
	text.WriteString(verifiedHead)
	for _, m := range models {
		if v, ok := found[m.name]; ok {
			fmt.Fprintln(&text, v.hash, v.spin, v.states, m.name)
		}
	}
	return text.Bytes()
}

func (m model) source(t *testing.T) []byte {
	t.Helper()
	source, err := os.ReadFile(m.file)
	require.NoError(t, err)
	return source
}

func (m model) hash(t *testing.T) string {
	t.Helper()
	flags := fmt.Sprintf("%q %q %q %v\n", m.defines, compileFlags, searchFlags, m.broken)
	sum := sha256.Sum256(append([]byte(flags), m.source(t)...))
	return fmt.Sprintf("%x", sum[:12])
}
