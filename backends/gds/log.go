// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/cufile"
)

// systemConfig is what the library reads where the user names nothing else.
const systemConfig = "/etc/cufile.json"

// logPlace is the file to name to the library, "" where the user has named one: it writes
// cufile.log into the working directory of the process unless its configuration, or its
// environment, says otherwise.
func logPlace(cfg *Config) (string, error) {
	if cfg.LogFile != "" {
		return cfg.LogFile, nil
	}
	log, path := cufile.Environment()
	if log != "" {
		return "", nil
	}
	if path == "" {
		path = systemConfig
	}
	if text, err := os.ReadFile(path); err == nil && namesLogs(text) {
		return "", nil
	}
	dir, err := privateFolder(filepath.Join(os.TempDir(), "sluice-"+strconv.Itoa(os.Getuid())))
	if err != nil {
		return "", fmt.Errorf("gds: make a folder for cuFile's log, or name Config.LogFile: %w",
			err)
	}
	return filepath.Join(dir, "cufile.log"), nil
}

// privateFolder makes a folder that is ours alone; where another user was there before, another
// one.
func privateFolder(dir string) (string, error) {
	err := os.Mkdir(dir, 0o700)
	if err == nil {
		return dir, nil
	}
	if !errors.Is(err, os.ErrExist) {
		return "", err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err == nil && st.Mode == unix.S_IFDIR|0o700 &&
		int(st.Uid) == os.Getuid() {
		return dir, nil
	}
	return os.MkdirTemp("", "sluice-cufile-*")
}

// namesLogs reports whether a cufile.json says where logs go. It may have comments, which JSON has
// not; what cannot be read says nothing.
func namesLogs(text []byte) bool {
	var c struct {
		Logging struct{ Dir string }
	}
	return json.Unmarshal(withoutComments(text), &c) == nil && c.Logging.Dir != ""
}

// withoutComments drops // and /* */ outside strings.
func withoutComments(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for i := 0; i < len(text); {
		switch rest := text[i:]; {
		case rest[0] == '"':
			n := stringLen(rest)
			out = append(out, rest[:n]...)
			i += n
		case len(rest) > 1 && rest[0] == '/' && rest[1] == '/':
			for i < len(text) && text[i] != '\n' {
				i++
			}
		case len(rest) > 1 && rest[0] == '/' && rest[1] == '*':
			end := bytes.Index(rest[2:], []byte("*/"))
			if end < 0 {
				return out
			}
			i += end + 4
		default:
			out = append(out, rest[0])
			i++
		}
	}
	return out
}

// stringLen is the length of the string that text begins with, quotes included.
func stringLen(text []byte) int {
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(text)
}
