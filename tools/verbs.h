/* The parts of `telpher verbs`. */
#ifndef TELPHER_TOOLS_VERBS_H
#define TELPHER_TOOLS_VERBS_H

int tool_verbs_run(int argc, char **argv);
int tool_verbs_fault(int argc, char **argv);
int tool_verbs_capture(int argc, char **argv);

#endif
